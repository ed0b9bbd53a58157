"""`oxygen_soak`, what `./run soak` runs: one fault after the other on the live node, for minutes.

Owns the order of things and the verdict: a synthetic robot and the node as a process, faults drawn
by a seed, and after each whether the node said so and acts again. Knows nothing of how a fault is
made (`soak_faults.py`) and of how commands are checked (`soak_witness.py`). The last line is JSON;
the exit code is 0 only if nothing was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oxygen_ros.evaluation import stall_watch
from oxygen_ros.evaluation.node_process import NodeProcess
from oxygen_ros.evaluation.soak_faults import FAULTS, Fault, World
from oxygen_ros.evaluation.soak_operator import SoakError, SoakOperator
from oxygen_ros.evaluation.soak_robot import SoakRobot
from oxygen_ros.evaluation.soak_witness import SoakWitness, ours
from oxygen_ros.evaluation.stage import graph, isolate_graph
from oxygen_ros.profile import load_profile, share_folder

PROFILE = 'dummy'
START_TIMEOUT_S = 180.0
# Generous: what is late on a busy machine is no lie. What never comes is found all the same.
TOLD_TIMEOUT_S = 30.0
RECOVERY_TIMEOUT_S = 60.0
LOOK_PERIOD_S = 0.02
FAULT_S = (0.5, 3.0)
CALM_S = (0.2, 1.0)
INTERRUPTED = 130


@dataclass
class Tally:
    """How often a fault came, and how often the node did what it must."""

    injected: int = 0
    told: int = 0  # in the diagnostics while it lasted, or went on acting where it must
    recovered: int = 0  # acted again afterwards, by itself


@dataclass
class Result:
    """What the JSON line holds."""

    seed: int
    seconds: float = 0.0
    faults: dict[str, Tally] = field(default_factory=dict)
    commands: int = 0
    chunks: int = 0
    misses: int = 0
    misses_ours: int = 0  # that neither the machine explains, nor our stopping the node
    missed_at_s: list[float] = field(default_factory=list)  # those, since the first fault
    machine_stalls: int = 0
    longest_stall_ms: float = 0.0
    slots_leaked: int = 0
    drops: dict[str, int] = field(default_factory=dict)
    num_violations: int = 0
    violations: list[str] = field(default_factory=list)
    exit_code: int | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def main(args: list[str] | None = None) -> int:
    """Soak; 0 if nothing was wrong, 1 if something was, 130 after Ctrl-C."""
    options = _parse(sys.argv[1:] if args is None else args)
    out = options.out or Path(tempfile.mkdtemp(prefix='oxygen_soak_'))
    out.mkdir(parents=True, exist_ok=True)
    print(f'soak for {options.minutes:g} min, seed {options.seed}; logs in {out}', flush=True)
    try:
        result = Soak(out, options.seed, options.only).run(60 * options.minutes)
    except KeyboardInterrupt:
        return INTERRUPTED
    _tell(result)
    return 0 if result.ok else 1


def _parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='oxygen_soak', description='Random faults on the live node, and whether it survives.'
    )
    names = [fault.name for fault in FAULTS]
    add = parser.add_argument
    add('--minutes', type=float, default=10.0, help='for so long (default 10)')
    add('--seed', type=int, default=0, help='of the faults (default 0)')
    add('--only', nargs='+', default=names, choices=names, metavar='FAULT', help=', '.join(names))
    add('--out', type=Path, help='folder of the logs (default: a new one in /tmp)')
    options = parser.parse_args(args)
    if options.minutes <= 0:
        parser.error(f'--minutes: expected a value above 0, got {options.minutes:g}')
    return options


class Soak:
    """One run. `module` is the node under test."""

    def __init__(
        self, out: Path, seed: int, only: list[str], module: str = 'oxygen_ros.node'
    ) -> None:
        self._out, self._module = out, module
        self._faults = [fault for fault in FAULTS if fault.name in only]
        self._rng = random.Random(seed)
        self._profile = load_profile(PROFILE, share_folder() / 'config')
        self._period_ns = round(1e9 / self._profile.command.rate_hz)
        self._stalls_path = out / 'stalls.txt'
        self._began_s = time.monotonic()
        self.result = Result(seed, faults={fault.name: Tally() for fault in self._faults})

    def run(self, seconds: float) -> Result:
        """Inject faults for so long, then judge."""
        isolate_graph()
        with ExitStack() as stack:
            node, spin = stack.enter_context(graph())
            world = self._make_world(node, stack)
            spin()
            try:
                self._await(
                    lambda: world.witness.num_chunks, START_TIMEOUT_S, 'the first chunk', world
                )
                self._soak(world, seconds)
                self._check_slots(world)
            except SoakError as error:
                self.result.problems.append(str(error))
            died = world.process.exit_code
            self.result.exit_code = world.process.stop() if died is None else died
        self._judge(world, died)
        return self.result

    def _make_world(self, node: Any, stack: ExitStack) -> World:
        process = NodeProcess({'profile': PROFILE}, self._out / 'node.log', self._module)
        stack.callback(process.kill)
        witness = SoakWitness(node, self._profile, stall_watch.RunDelay(process.pid))
        robot = SoakRobot(node, self._profile, self._out, witness.check.measure)
        stack.callback(robot.stop)
        self._watch_machine(stack)
        robot.start()
        return World(process, robot, SoakOperator(node), witness)

    def _watch_machine(self, stack: ExitStack) -> None:
        arguments = [str(self._stalls_path), str(self._period_ns // 2)]
        watch = subprocess.Popen([sys.executable, '-m', stall_watch.__name__, *arguments])
        stack.callback(watch.wait)
        stack.callback(watch.kill)

    # --- faults

    def _soak(self, world: World, seconds: float) -> None:
        self._began_s = time.monotonic()
        for fault in self._order():
            if time.monotonic() - self._began_s >= seconds:
                return
            self._inject(fault, world)
            time.sleep(self._rng.uniform(*CALM_S))

    def _order(self) -> Iterator[Fault]:
        """Every fault once per round, in another order each."""
        while True:
            yield from self._rng.sample(self._faults, len(self._faults))

    def _inject(self, fault: Fault, world: World) -> None:
        tally, began_s = self.result.faults[fault.name], time.monotonic()
        tally.injected += 1
        print(f'{began_s - self._began_s:7.1f} s  {fault.name:18}', end='', flush=True)
        lasting_s = self._rng.uniform(*FAULT_S)
        began_ns = time.monotonic_ns()
        with fault.act(world, self._rng):
            told = self._await_word(fault, world, began_ns)
            tally.told += told
            time.sleep(max(0.0, began_s + lasting_s - time.monotonic()))
        lasted_s, ended_s = time.monotonic() - began_s, time.monotonic()
        chunks, acted = world.witness.num_chunks, world.witness.num_acted
        recovered = self._wait(
            lambda: world.witness.num_chunks > chunks + 1 and world.witness.num_acted > acted,
            RECOVERY_TIMEOUT_S,
            world,
        )
        tally.recovered += recovered
        word = 'said so' if told else 'NOT TOLD'
        after = f'acts after {time.monotonic() - ended_s:.1f} s' if recovered else 'NO RECOVERY'
        print(f' {lasted_s:5.1f} s, {word}, {after}', flush=True)
        if world.process.exit_code is not None:
            raise SoakError(f'the node ended by itself during: {fault.name}')

    def _await_word(self, fault: Fault, world: World, since_ns: int) -> bool:
        """Whether the node says what it must, and acts where it can."""
        witness, chunks = world.witness, world.witness.num_chunks
        said = fault.told is None or self._wait(
            lambda: fault.told is not None and witness.told(*fault.told, since_ns),
            TOLD_TIMEOUT_S,
            world,
        )
        acts = not fault.goes_on or self._wait(
            lambda: witness.num_chunks > chunks + 1, TOLD_TIMEOUT_S, world
        )
        return said and acts

    def _wait(self, is_true: Callable[[], Any], timeout_s: float, world: World) -> bool:
        limit_s = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() > limit_s or world.process.exit_code is not None:
                return False
            time.sleep(LOOK_PERIOD_S)
        return True

    def _await(self, is_true: Callable[[], Any], timeout_s: float, what: str, world: World) -> None:
        if not self._wait(is_true, timeout_s, world):
            raise SoakError(f'waited {timeout_s:g} s for {what}')

    def _check_slots(self, world: World) -> None:
        """At rest nothing is being decoded, and then every slot must be free."""
        world.operator.change('deactivate')
        self._wait(lambda: world.witness.stats.slots_used == 0, TOLD_TIMEOUT_S, world)
        self.result.slots_leaked = world.witness.stats.slots_used

    # --- the verdict

    def _judge(self, world: World, died: int | None) -> None:
        result, witness = self.result, world.witness
        stalls = stall_watch.stalls(self._stalls_path)
        result.seconds = round(time.monotonic() - self._began_s, 1)
        result.commands, result.chunks = witness.num_commands, witness.num_chunks
        result.misses = sum(misses.count for misses in witness.misses)
        excused = [*stalls, *witness.starved, *world.excused]
        for misses in ours(witness.misses, excused, 2 * self._period_ns):
            result.misses_ours += misses.count
            result.missed_at_s.append(round(misses.end_ns / 1e9 - self._began_s, 1))
        result.machine_stalls = len(stalls)
        result.longest_stall_ms = max((end - begin for begin, end in stalls), default=0) / 1e6
        result.drops = dict(witness.drops)
        result.num_violations, result.violations = witness.num_violations, witness.violations
        result.problems += problems(result, died)


def problems(result: Result, died: int | None) -> list[str]:
    """Say everything that must not be, in the order of its weight."""
    found = []
    if result.num_violations:
        found.append(f'{result.num_violations} commands were wrong: {result.violations[0]}')
    if died is not None:
        found.append(f'the node ended by itself with exit code {died}')
    elif result.exit_code != 0:
        found.append(f'the node did not end well: exit code {result.exit_code}')
    if result.misses_ours:
        found.append(
            f'{result.misses_ours} deadlines missed while the machine was awake, at '
            f'{result.missed_at_s} s'
        )
    if result.slots_leaked:
        found.append(f'{result.slots_leaked} slots still in use at rest')
    for name, tally in result.faults.items():
        if tally.told < tally.injected:
            found.append(
                f'{name}: not told {tally.injected - tally.told} of {tally.injected} times'
            )
        if tally.recovered < tally.injected:
            lost = tally.injected - tally.recovered
            found.append(f'{name}: no recovery {lost} of {tally.injected} times')
    return found


def _tell(result: Result) -> None:
    injected = sum(tally.injected for tally in result.faults.values())
    survived = sum(tally.recovered for tally in result.faults.values())
    print(
        f'\n{injected} faults, {survived} survived; {result.commands} commands, '
        f'{result.misses} deadlines missed, {result.misses_ours} of them by us; '
        f'{result.machine_stalls} stalls of the machine, the longest '
        f'{result.longest_stall_ms:.0f} ms'
    )
    lost = ', '.join(f'{count} {reason}' for reason, count in sorted(result.drops.items()))
    print(f'thrown away on the way: {lost or "nothing"}')
    for problem in result.problems:
        print(f'PROBLEM  {problem}')
    print(json.dumps({'ok': result.ok, **asdict(result)}))


if __name__ == '__main__':
    sys.exit(main())
