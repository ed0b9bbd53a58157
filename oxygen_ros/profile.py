"""RobotProfile: topics, joint order, units, limits, tasks and model of one robot.

Owns the YAML files of `config/` and every check on them, so that nothing behind it meets a
half-sensible number. Knows neither ROS messages nor tensors; `node.py` and `evaluation/` call
`load_profile` once, before anything moves.

The schema is the frozen dataclasses below: names, types, defaults and ranges stand once, in the
field, and one small reader checks a file against them. Pydantic and msgspec would be a second way
to write the schema and one more thing to install on a robot, and report an unknown key without
saying which one was meant.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
import types
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

Quantity = Literal['position', 'velocity']

# A ROS 2 topic name: relative, private (`~/`) or absolute; no token starts with a digit.
_TOPIC = re.compile(r'(~/|/)?[A-Za-z_]\w*(/[A-Za-z_]\w*)*', re.ASCII)
_TASK_NAME = re.compile(r'[a-z][a-z0-9_]*')

MAX_VALUES = 10_000
"""No robot needs more values in its profile."""
MAX_WHOLE_NUMBER = 2**53
"""Up to here a float is every whole number."""


class ProfileError(ValueError):
    """A profile that cannot be used: names the file, the key, what was expected, what came."""


def _positive(**kwargs: Any) -> Any:
    return field(metadata={'above': 0}, **kwargs)


def _rate() -> Any:
    """Beyond these a period is no whole number of nanoseconds, or longer than anybody waits."""
    return field(metadata={'minimum': 0.001, 'maximum': 1000})


def _age() -> Any:
    return field(metadata={'above': 0, 'maximum': 1e9})


def _at_least(minimum: int, maximum: int = 10_000, **kwargs: Any) -> Any:
    """A count, up to what no robot and no model exceeds."""
    return field(metadata={'minimum': minimum, 'maximum': maximum}, **kwargs)


def _per_joint(**metadata: Any) -> Any:
    """One value per command, or in YAML a single one for all."""
    return field(metadata={'per_joint': True, **metadata})


@dataclass(frozen=True, kw_only=True)
class CameraProfile:
    """One camera: where its pictures come from and which input of the model they are."""

    slot: str  # model camera slot, e.g. base_0_rgb
    topic: str  # subscribed exactly as written, so with /compressed where that is meant
    transport: Literal['raw', 'compressed'] = 'raw'
    encoding: str = ''  # '' believes the message; else overrides its encoding (drivers lie)
    rotate_180: bool = False  # a picture taken upside down, or a model trained on such
    required: bool = True  # no frame without it; an optional camera that is absent is left out
    max_age_s: float = _age()
    expected_hz: float = _at_least(0, default=0.0)  # for diagnostics; 0 = unknown
    deadline_s: float = _at_least(0, default=0.0)  # Deadline QoS that is asked for; 0 = none
    openpi_key: str = ''  # with the parameter openpi_config only; '' = that of action.adapter


@dataclass(frozen=True, kw_only=True)
class JointsProfile:
    """The measured joints; the order of `names` is the order of the model's state vector."""

    topic: str
    names: tuple[str, ...]
    max_age_s: float = _age()
    assume_order: bool = False  # accept messages without names when their length fits exactly
    deadline_s: float = _at_least(0, default=0.0)  # Deadline QoS that is asked for; 0 = none
    openpi_key: str = ''  # with the parameter openpi_config only; '' = that of action.adapter


@dataclass(frozen=True, kw_only=True)
class InstructionProfile:
    topic: str
    default: str = ''  # the instruction until one arrives; '' = none
    # An instruction that was not repeated for so long counts as none; 0 = it holds for ever.
    max_age_s: float = _at_least(0, default=0.0)


@dataclass(frozen=True, kw_only=True)
class CommandProfile:
    """What leaves for the robot, how often, and what may leave at all.

    The tuples hold one value per command, in the order of `names` and in the robot's units: rad and
    rad/s for a revolute joint, m and m/s for a prismatic one, unless the file says otherwise. In
    YAML lower, upper and max_velocity stand under `limits`.
    """

    interface: Literal['joint_trajectory', 'joint_state', 'forward_command']
    topic: str
    names: tuple[str, ...] = ()  # in YAML () means: those of `joints`
    continuous: tuple[str, ...] = ()  # these turn without end: a whole turn [rad] is no difference
    quantity: tuple[Quantity, ...] = _per_joint()
    rate_hz: float = _rate()
    interpolation: Literal['linear', 'previous'] = 'linear'
    fallback: Literal['hold', 'stop', 'home'] = 'hold'
    home: tuple[float, ...] | None = field(default=None, metadata={'per_joint': True})
    # Whoever may stop the robot has to say on ~/estop at least so often that it need not; 0 = no.
    estop_heartbeat_s: float = _at_least(0, default=0.0)
    # Position limits. A velocity command may not drive the measured position further outside them.
    lower: tuple[float, ...] = _per_joint(block='limits', unbounded=True)
    upper: tuple[float, ...] = _per_joint(block='limits', unbounded=True)
    # A velocity may be no larger; a position may step by no more than max_velocity / rate_hz.
    max_velocity: tuple[float, ...] = _per_joint(block='limits', above=0)


@dataclass(frozen=True, kw_only=True)
class ActionProfile:
    """What the numbers of an action chunk mean."""

    rate_hz: float = _rate()  # rows of a chunk are 1 / rate_hz apart
    adapter: Literal['identity', 'aloha', 'droid', 'libero'] = 'identity'
    # True: this dimension is a difference to the state of the observation; () = all are absolute.
    delta_mask: tuple[bool, ...] = field(default=(), metadata={'per_joint': True})
    # How a chunk meets the one before it; the keys below are read by the modes named there.
    blending: Literal['replace', 'ensemble', 'rtc', 'rtc_identity', 'rtc_trained'] = 'replace'
    # rtc, rtc_identity: rows of the new chunk that are drawn to the old one: fully while they are
    # executed before it comes, then by the schedule, not at all from row execution_horizon on.
    execution_horizon: int = _at_least(1, default=10)
    guidance_schedule: Literal['zeros', 'ones', 'linear', 'exp'] = 'linear'
    max_guidance_weight: float = _positive(default=10.0)
    # ensemble: a chunk made n rows after the oldest one weighs exp(-ensemble_coefficient * n).
    ensemble_coefficient: float = field(default=0.01, metadata={'minimum': -1000, 'maximum': 1000})


@dataclass(frozen=True, kw_only=True)
class GripperProfile:
    """How one joint of the robot counts and how the model does, for state and command alike.

    The two are linear in each other: `model[0]` is `robot[0]`, or with `invert` is `robot[1]`.
    """

    joint: str  # in joints.names, in command.names, or in both
    model: tuple[float, ...]  # lowest and highest, in the unit the model was trained on
    robot: tuple[float, ...]  # the same two positions, or with `invert` the other way round
    invert: bool = False

    def share(self, position: float) -> float:
        """Where in the robot's range a position is: 0 at the lowest, 1 at the highest."""
        low, high = self.robot
        return (position - low) / (high - low)


@dataclass(frozen=True, kw_only=True)
class TaskProfile:
    """A language task: text is streamed to people, memory notes are published whole."""

    name: str
    kind: Literal['text', 'memory']
    topic: str
    prompt: str = ''  # appended behind the shared prefix
    period_frames: int = _at_least(1, 1_000_000)  # due every so many frames
    max_new_tokens: int = _at_least(1)
    max_age_s: float = _age()  # older unfinished text is expired
    priority: int = 0  # higher goes first when not all fit
    stream: bool = False  # publish what is there so far, not only the whole


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """What becomes of memory notes besides being published."""

    # The newest so many notes stand in the prompt, see model/prompt.py; 0 = none. Only for a
    # checkpoint that was trained with such prompts.
    feed_back: int = _at_least(0, default=0)


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """Properties of the checkpoint that its weights do not tell."""

    preset: Literal['pi05', 'mid', 'dummy', 'tabletop']
    prefix_attention: Literal['bidirectional', 'causal'] = 'bidirectional'
    prompt: Literal['state', 'plain', 'subtask'] = 'state'
    normalization: Literal['quantile', 'mean_std', 'none'] = 'quantile'
    num_denoise_steps: int = _at_least(1, default=10)
    random_weights: bool = False
    norm_stats: str = ''  # asset id or path; '' = search beside the checkpoint
    # Rows of a chunk; 0 = what config.json says, else the preset's.
    action_horizon: int = _at_least(0, default=0)
    # Largest delay [rows] that the checkpoint was trained to act under (arXiv 2512.05964); 0 = none
    training_max_delay: int = _at_least(0, default=0)


@dataclass(frozen=True, kw_only=True)
class RobotProfile:
    name: str
    frame_rate_hz: float = _rate()
    cameras: tuple[CameraProfile, ...]
    joints: JointsProfile
    instruction: InstructionProfile
    command: CommandProfile
    action: ActionProfile
    grippers: tuple[GripperProfile, ...] = ()  # () = the robot counts as the model does
    tasks: tuple[TaskProfile, ...] = ()
    memory: MemoryProfile = MemoryProfile()
    model: ModelProfile


def load_profile(name_or_path: str, search_dir: Path) -> RobotProfile:
    """Read `aloha` as search_dir/aloha.yaml, anything with a slash or .yaml as a path.

    Raises ProfileError that names the file, the dotted key, what was expected and what came.
    """
    path = _find(name_or_path, search_dir)
    try:
        raw = yaml.load(path.read_text(encoding='utf-8'), _StrictLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        # ValueError: bytes that are no UTF-8, and dates and numbers that are none.
        raise ProfileError(f'{path}: not readable as YAML: {error}') from error
    return read_profile(raw, str(path))


def read_profile(raw: Any, source: str) -> RobotProfile:
    """Check plain values, laid out as in a file; `source` is what errors call that file."""
    profile: RobotProfile = _Reader(source, _num_commands(raw)).record(RobotProfile, raw, '')
    if not profile.command.names:
        command = replace(profile.command, names=profile.joints.names)
        profile = replace(profile, command=command)
    problems = [f'{source}: {problem}' for problem in _problems(profile)]
    if problems:
        raise ProfileError('\n'.join(problems))
    return profile


def plain_profile(profile: RobotProfile) -> dict[str, Any]:
    """Return the profile as `read_profile` takes it: JSON and YAML hold it without loss."""
    return _plain_record(profile)


def _plain_record(record: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for spec in fields(record):
        block = spec.metadata.get('block')
        into = plain.setdefault(block, {}) if block else plain
        into[spec.name] = _plain_value(getattr(record, spec.name))
    return plain


def _plain_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain_value(one) for one in value]
    return _plain_record(value) if is_dataclass(value) else value


def share_folder() -> Path:
    """Return the folder that holds config/ and resource/: as installed, else the source tree."""
    try:
        from ament_index_python.packages import get_package_share_directory

        return Path(get_package_share_directory('oxygen_ros'))
    except (ImportError, LookupError, OSError):  # no ROS, not sourced, not built
        return Path(__file__).resolve().parents[1]


def _find(name_or_path: str, search_dir: Path) -> Path:
    is_path = '/' in name_or_path or name_or_path.endswith(('.yaml', '.yml'))
    path = Path(name_or_path).expanduser() if is_path else search_dir / f'{name_or_path}.yaml'
    if path.is_file():
        return path
    if is_path:
        raise ProfileError(f'{path}: no such profile file')
    # The node's parameter file lives in the same folder and is no profile.
    files = [file for file in search_dir.glob('*.yaml') if '\ncameras:' in file.read_text()]
    known = sorted(file.stem for file in files)
    raise ProfileError(
        f'no profile {name_or_path!r} in {search_dir}{_did_you_mean(name_or_path, known)}; '
        f'there are: {", ".join(known) or "none"}'
    )


def _did_you_mean(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f', did you mean {close[0]!r}?' if close else ''


def _num_commands(raw: Any) -> int:
    """How many values a single per-joint one stands for; 0 if the file does not tell."""
    for section in ('command', 'joints'):
        block = raw.get(section) if isinstance(raw, dict) else None
        names = block.get('names') if isinstance(block, dict) else None
        if isinstance(names, list) and names:
            return len(names)
    return 0


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, where PyYAML would silently take the last one.

    And aliases of aliases: a few lines of them stand for more values than fit in a message.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _num_values(node, {}) > MAX_VALUES:
            raise yaml.constructor.ConstructorError(
                None, None, f'expected at most {MAX_VALUES} values, aliases included', None
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'the key {key!r} is given twice', key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _num_values(node: yaml.Node, known: dict[int, float]) -> float:
    """How many values a node stands for where each alias is written out; inf if it holds itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            children = itertools.chain.from_iterable(children)
        known[id(node)] = 1 + sum(_num_values(child, known) for child in children)
    return known[id(node)]


class _Reader:
    """Builds typed, frozen records from plain YAML values; the first bad value ends it."""

    def __init__(self, source: str, num_commands: int) -> None:
        self._source = source
        self._num_commands = num_commands

    def record(self, cls: type, raw: Any, key: str) -> Any:
        """One dataclass from one mapping; fields with a `block` stand one level deeper in YAML."""
        hints = get_type_hints(cls)
        found: dict[str, Any] = {}
        blocks: dict[str, dict[str, Field[Any]]] = {'': {}}
        for spec in fields(cls):
            blocks.setdefault(spec.metadata.get('block', ''), {})[spec.name] = spec
        top = self._mapping(raw, key, [*blocks[''], *(block for block in blocks if block)])
        for block, specs in blocks.items():
            where = _join(key, block) if block else key
            values = self._mapping(top.get(block, {}), where, list(specs)) if block else top
            for name, spec in specs.items():
                if name in values:
                    found[name] = self._field(spec, hints[name], values[name], _join(where, name))
                elif spec.default is MISSING:
                    raise self._error(_join(where, name), 'is missing')
        return cls(**found)

    def _mapping(self, raw: Any, key: str, allowed: list[str]) -> Mapping[str, Any]:
        if not isinstance(raw, dict):
            raise self._wrong(key or 'the file', f'keys ({", ".join(allowed)})', raw)
        for name in raw:
            if name not in allowed:
                hint = _did_you_mean(str(name), allowed)
                raise self._error(
                    _join(key, str(name)), f'unknown key{hint}; allowed here: {", ".join(allowed)}'
                )
        return raw

    def _field(self, spec: Field[Any], annotation: Any, raw: Any, key: str) -> Any:
        is_scalar = not isinstance(raw, (list, dict)) and raw is not None
        if spec.metadata.get('per_joint') and is_scalar:
            raw = [raw] * self._num_commands
        value = self._value(annotation, raw, key)
        for number in value if isinstance(value, tuple) else (value,):
            self._check_range(spec.metadata, number, key)
        return value

    def _value(self, annotation: Any, raw: Any, key: str) -> Any:
        """`raw` as the annotated type: a choice, a list, an optional, a record or a plain value."""
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Literal:
            return self._choice(arguments, raw, key)
        if origin is tuple:
            if not isinstance(raw, list):
                raise self._wrong(key, 'a list', raw)
            return tuple(self._value(arguments[0], one, f'{key}[{i}]') for i, one in enumerate(raw))
        if origin in (Union, types.UnionType):
            return None if raw is None else self._value(arguments[0], raw, key)
        if isinstance(annotation, type) and is_dataclass(annotation):
            return self.record(annotation, raw, key)
        if type(raw) is int and abs(raw) > MAX_WHOLE_NUMBER:
            got = f'a whole number of {raw.bit_length()} bits'
            raise self._error(key, f'expected a number within 2^53; got {got}')
        if annotation is float and type(raw) is int:
            return float(raw)
        # An exact type, because YAML's true is a bool and Python's bool is an int.
        if type(raw) is not annotation:
            raise self._wrong(key, _KIND[annotation], raw)
        return raw.strip() if annotation is str else raw

    def _choice(self, allowed: tuple[str, ...], raw: Any, key: str) -> str:
        if raw not in allowed:
            hint = _did_you_mean(str(raw), list(allowed))
            raise self._error(key, f'expected one of {", ".join(allowed)}; got {raw!r}{hint}')
        return str(raw)

    def _check_range(self, limits: Mapping[str, Any], value: Any, key: str) -> None:
        if not isinstance(value, (int, float)):
            return
        if math.isnan(value) or (math.isinf(value) and 'unbounded' not in limits):
            raise self._wrong(key, 'a finite number', value)
        if 'above' in limits and not value > limits['above']:
            raise self._wrong(key, f'a value above {limits["above"]}', value)
        if 'minimum' in limits and not value >= limits['minimum']:
            raise self._wrong(key, f'a value of at least {limits["minimum"]}', value)
        if 'maximum' in limits and not value <= limits['maximum']:
            raise self._wrong(key, f'a value of at most {limits["maximum"]}', value)

    def _wrong(self, key: str, expected: str, got: Any) -> ProfileError:
        return self._error(key, f'expected {expected}; got {got!r} ({type(got).__name__})')

    def _error(self, key: str, problem: str) -> ProfileError:
        return ProfileError(f'{self._source}: {key}: {problem}')


_KIND = {str: 'a text', bool: 'true or false', int: 'a whole number', float: 'a number'}


def _join(key: str, name: str) -> str:
    return f'{key}.{name}' if key else name


def _problems(profile: RobotProfile) -> Iterator[str]:
    """What no single key can be blamed for: lengths, duplicates, combinations; all at once."""
    if not profile.name:
        yield 'name: is empty'
    yield from _name_problems(profile)
    yield from _topic_problems(profile)
    # Lengths first: the checks behind them compare joint by joint.
    lengths = list(_length_problems(profile))
    yield from lengths
    if not lengths:
        yield from _command_problems(profile)
        yield from _continuous_problems(profile)
        yield from _gripper_problems(profile)
        yield from _delta_problems(profile)
    yield from _blending_problems(profile)
    yield from _feed_back_problems(profile)


def _name_problems(profile: RobotProfile) -> Iterator[str]:
    if not profile.cameras:
        yield 'cameras: at least one camera is needed'
    yield from _duplicates('cameras', 'slot', [camera.slot for camera in profile.cameras])
    yield from _duplicates('cameras', 'topic', [camera.topic for camera in profile.cameras])
    yield from _duplicates('tasks', 'name', [task.name for task in profile.tasks])
    yield from _duplicates('tasks', 'topic', [task.topic for task in profile.tasks])
    for i, camera in enumerate(profile.cameras):
        if not camera.slot:
            yield f'cameras[{i}].slot: is empty'
    for i, task in enumerate(profile.tasks):
        if not _TASK_NAME.fullmatch(task.name):
            yield f'tasks[{i}].name: expected lower case letters, digits and _; got {task.name!r}'
    for key, names in (('joints', profile.joints.names), ('command', profile.command.names)):
        if not names:
            yield f'{key}.names: at least one joint is needed'
        if '' in names:
            yield f'{key}.names: holds an empty name'
        yield from _duplicates(key, 'names', list(names))


def _duplicates(key: str, what: str, values: list[str]) -> Iterator[str]:
    for value in sorted({value for value in values if values.count(value) > 1}):
        yield f'{key}: {what} {value!r} is given {values.count(value)} times'


def _topic_problems(profile: RobotProfile) -> Iterator[str]:
    topics = {f'cameras[{i}].topic': camera.topic for i, camera in enumerate(profile.cameras)}
    topics['joints.topic'] = profile.joints.topic
    topics['instruction.topic'] = profile.instruction.topic
    topics['command.topic'] = profile.command.topic
    topics.update({f'tasks[{i}].topic': task.topic for i, task in enumerate(profile.tasks)})
    for key, topic in topics.items():
        if not _TOPIC.fullmatch(topic):
            yield (
                f'{key}: expected a ROS topic name (letters, digits, _ and single /, no token '
                f'starting with a digit, no / at the end); got {topic!r}'
            )
    if profile.command.topic == profile.joints.topic:
        yield 'command.topic: is also joints.topic, so commands would be read back as measurements'


def _length_problems(profile: RobotProfile) -> Iterator[str]:
    command, action = profile.command, profile.action
    expected = len(command.names)
    lengths: dict[str, int] = {
        'command.quantity': len(command.quantity),
        'command.limits.lower': len(command.lower),
        'command.limits.upper': len(command.upper),
        'command.limits.max_velocity': len(command.max_velocity),
    }
    if command.home is not None:
        lengths['command.home'] = len(command.home)
    if action.delta_mask:
        lengths['action.delta_mask'] = len(action.delta_mask)
    for key, length in lengths.items():
        if length != expected:
            yield f'{key}: expected {expected} values, one per command; got {length}'


def _command_problems(profile: RobotProfile) -> Iterator[str]:
    command = profile.command
    for name, lower, upper in zip(command.names, command.lower, command.upper, strict=True):
        if not lower < upper:
            yield f'command.limits: {name}: expected lower < upper; got {lower:g} and {upper:g}'
    if command.interface == 'joint_trajectory' and 'velocity' in command.quantity:
        yield 'command.quantity: joint_trajectory takes positions only; use forward_command'
    if command.interface == 'joint_state' and len(set(command.quantity)) > 1:
        yield (
            'command.quantity: joint_state carries either positions or velocities for all joints; '
            'use forward_command for a mixture'
        )
    for name, quantity in zip(command.names, command.quantity, strict=True):
        if quantity == 'position' and name not in profile.joints.names:
            # The first command and `hold` are relative to the measurement, so it must exist.
            yield f'command.names: position of {name!r} is commanded but it is not in joints.names'
    yield from _fallback_problems(command)


def _continuous_problems(profile: RobotProfile) -> Iterator[str]:
    command = profile.command
    limits = dict(zip(command.names, zip(command.lower, command.upper, strict=True), strict=True))
    for name in command.continuous:
        if name not in command.names or name not in profile.joints.names:
            yield f'command.continuous: {name!r} must be in joints.names and in command.names'
        elif limits[name] != (-math.inf, math.inf):
            yield (
                f'command.limits: {name} is in command.continuous, so expected -.inf and .inf; '
                f'got {limits[name][0]:g} and {limits[name][1]:g}'
            )
    if command.continuous and profile.action.blending == 'ensemble':
        yield (
            'action.blending: ensemble cannot average the turns of command.continuous; expected '
            'replace or rtc'
        )


def _gripper_problems(profile: RobotProfile) -> Iterator[str]:
    yield from _duplicates('grippers', 'joint', [gripper.joint for gripper in profile.grippers])
    command = dict(zip(profile.command.names, profile.command.quantity, strict=True))
    for i, gripper in enumerate(profile.grippers):
        for key, ends in (('model', gripper.model), ('robot', gripper.robot)):
            if len(ends) != 2 or not ends[0] < ends[1]:
                yield (
                    f'grippers[{i}].{key}: expected the lowest and the highest position; '
                    f'got {list(ends)}'
                )
        if gripper.joint not in (*profile.joints.names, *command):
            yield (
                f'grippers[{i}].joint: {gripper.joint!r} is neither in joints.names nor in '
                f'command.names'
            )
        if command.get(gripper.joint) == 'velocity':
            yield f'grippers[{i}].joint: {gripper.joint!r} is commanded by velocity, not position'


def _fallback_problems(command: CommandProfile) -> Iterator[str]:
    if command.fallback == 'stop' and 'velocity' in command.quantity:
        yield 'command.fallback: stop would leave the last velocity in force; use hold'
    if command.fallback == 'stop' and command.interface == 'joint_trajectory':
        yield 'command.fallback: stop would leave the last trajectory in force; use hold'
    if command.fallback == 'home':
        if command.home is None:
            yield 'command.home: is missing, and command.fallback is home'
        if 'velocity' in command.quantity:
            yield 'command.fallback: home needs positions, but command.quantity has a velocity'
    for name, lower, home, upper in zip(
        command.names, command.lower, command.home or (), command.upper, strict=False
    ):
        if not lower <= home <= upper:
            yield f'command.home: {name}: {home:g} is outside its limits {lower:g} to {upper:g}'


def _delta_problems(profile: RobotProfile) -> Iterator[str]:
    command, joints = profile.command.names, profile.joints.names
    for i, is_delta in enumerate(profile.action.delta_mask):
        state = joints[i] if i < len(joints) else 'nothing'
        if is_delta and state != command[i]:
            # openpi adds delta i to state i, whatever their names are.
            yield (
                f'action.delta_mask[{i}]: {command[i]!r} would be added to '
                f'state {i}, which is {state!r}'
            )


def _blending_problems(profile: RobotProfile) -> Iterator[str]:
    action, model = profile.action, profile.model
    if action.blending == 'rtc_trained' and not model.training_max_delay:
        yield (
            'action.blending: rtc_trained needs a checkpoint that was trained for it: expected '
            'model.training_max_delay of at least 1; got 0 (rtc needs no such training)'
        )
    if not model.action_horizon:  # the preset's, which the factory knows
        return
    yield from blending_misfits(profile, model.action_horizon)


def _feed_back_problems(profile: RobotProfile) -> Iterator[str]:
    number = profile.memory.feed_back
    if number and not any(task.kind == 'memory' for task in profile.tasks):
        yield f'memory.feed_back: expected 0 without a task of kind memory; got {number}'
    if number and profile.model.prompt != 'state':
        yield (
            f'memory.feed_back: expected 0 with model.prompt: {profile.model.prompt}, which has no '
            f'place for notes (state has one); got {number}'
        )


def blending_misfits(profile: RobotProfile, horizon: int) -> Iterator[str]:
    """What of a profile's blending does not fit chunks of `horizon` rows, key by key."""
    action, delay = profile.action, profile.model.training_max_delay
    if action.blending in ('rtc', 'rtc_identity') and action.execution_horizon > horizon:
        yield (
            f'action.execution_horizon: expected at most {horizon}, the rows of a chunk; '
            f'got {action.execution_horizon}'
        )
    if delay >= horizon:
        yield (
            f'model.training_max_delay: expected less than {horizon}, the rows of a chunk; '
            f'got {delay}'
        )
