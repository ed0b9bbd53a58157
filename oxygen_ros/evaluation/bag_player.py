"""`oxygen_play` and BagPlayer: a rosbag2 recording back into the graph, byte for byte, with /clock.

Owns the timing of a replay and the publishers. Knows nothing of the model or of profiles; the
program below and the demo call it. Its only hand on a message is the header stamp, and only when
a recording is repeated with time going on.

Time. /clock follows the log time (when a message was recorded), as `ros2 bag play --clock` does.
A node on sim time then sees each message arrive at its own log time. A header stamp a little older
than that is the true age of the sample; one that is out of reach (8.8 s in one of our recordings,
zero in another) is taken by the node for a foreign clock, and the log time is used instead. So
observations are fresh under use_sim_time in both cases. In between lies what was too old when it
was recorded, and it is too old again. A clock made of header stamps would have to be one clock for
several sources, and the sources disagree.
"""

from __future__ import annotations

import argparse
import struct
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from oxygen_ros.evaluation.recording import (
    NS_PER_S,
    BagError,
    RecordedTopic,
    Recording,
    message_class,
)

DEFAULT_CLOCK_HZ = 100.0
# After the last message of a repetition when no topic tells how often it comes.
DEFAULT_GAP_NS = 100_000_000

Loop = Literal['', 'back', 'onward']


def shift_stamp(data: bytes, shift_ns: int) -> bytes:
    """Move the stamp of a message that begins with a std_msgs/Header; 0, "no stamp", stays."""
    layout = '<iI' if data[1] & 1 else '>iI'
    sec, nanosec = struct.unpack_from(layout, data, 4)
    if sec == nanosec == 0:
        return data
    moved = divmod(sec * NS_PER_S + nanosec + shift_ns, NS_PER_S)
    return data[:4] + struct.pack(layout, *moved) + data[12:]


class BagPlayer:
    """Publishes a recording on absolute steady deadlines, so that pauses never add up.

    `play` blocks; `start` and `stop` do the same in a thread of its own. Any thread may read
    `now_ns`, `position_s`, `num_published`, `repetition` and `error`.
    """

    def __init__(
        self,
        node: Any,
        recording: Recording,
        topics: Mapping[str, str] | None = None,
        *,
        rate: float = 1.0,
        clock_hz: float = 0.0,
        loop: Loop = '',
        duration_s: float | None = None,
    ) -> None:
        """Make the publishers. Raises BagError if a topic is not in the recording.

        Args:
            node: rclpy node that publishes; need not be spun.
            topics: recorded name -> name to publish on; None plays everything as it is called.
            rate: bag seconds per second.
            clock_hz: /clock messages per second; 0 = none.
            loop: 'back' starts over with the clock jumping back, 'onward' shifts each repetition
                in time, header stamps included, so that time goes on.
            duration_s: plays only the first so many bag seconds.
        """
        if topics is None:
            topics = {name: name for name in recording.topics}
        recording.check_topics(list(topics))
        self._recording = recording
        self._rate, self._loop = rate, loop
        self._end_ns = recording.end_ns
        if duration_s is not None:
            self._end_ns = min(self._end_ns, recording.start_ns + round(duration_s * NS_PER_S))
        self.skipped: dict[str, str] = {}  # recorded name -> type that is not installed
        self._publishers: dict[str, Any] = {}
        self._stamped: set[str] = set()
        for name, published in topics.items():
            self._add_publisher(node, recording.topics[name], published)
        self._clock = _ClockPublisher(node, clock_hz) if clock_hz > 0 else None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        # Written by the playing thread: bag time that corresponds to a steady time, from then on.
        self._anchor = (recording.start_ns, 0)
        self.num_published = 0
        self.repetition = 0
        self.error: BagError | None = None

    def _add_publisher(self, node: Any, topic: RecordedTopic, published: str) -> None:
        from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

        found = message_class(topic.type_name)
        if found is None:
            self.skipped[topic.name] = topic.type_name
            return
        if next(iter(found.get_fields_and_field_types().values()), '') == 'std_msgs/Header':
            self._stamped.add(topic.name)
        qos = QoSProfile(depth=topic.depth)
        if not topic.reliable:
            qos.reliability = ReliabilityPolicy.BEST_EFFORT
        if topic.latched:
            qos.durability = DurabilityPolicy.TRANSIENT_LOCAL
        self._publishers[topic.name] = node.create_publisher(found, published, qos)

    @property
    def topics(self) -> list[str]:
        """Recorded names of the topics that are played."""
        return list(self._publishers)

    @property
    def now_ns(self) -> int:
        """Bag time of this moment; it stands at the start until the playing begins."""
        bag_ns, steady_ns = self._anchor
        if steady_ns == 0:
            return bag_ns
        return bag_ns + round((time.monotonic_ns() - steady_ns) * self._rate)

    @property
    def position_s(self) -> float:
        """Bag seconds into the current repetition."""
        onward_ns = self.repetition * self._pass_ns if self._loop == 'onward' else 0
        length_ns = self._end_ns - self._recording.start_ns
        position_ns = self.now_ns - self._recording.start_ns - onward_ns
        return min(max(position_ns, 0), length_ns) / NS_PER_S

    @property
    def _pass_ns(self) -> int:
        """Bag time from one repetition to the next: its length and a gap as between messages."""
        length_ns = self._end_ns - self._recording.start_ns
        counts = [self._recording.topics[name].num_messages for name in self._publishers]
        most = max(counts, default=0)
        return length_ns + (length_ns // (most - 1) if most > 1 and length_ns else DEFAULT_GAP_NS)

    def wait_for_subscribers(self, timeout_s: float) -> list[str]:
        """Return the recorded names that still have no subscriber after at most `timeout_s`.

        The clock stands at the start meanwhile, so that nodes on sim time can come up.
        """
        limit = time.monotonic() + timeout_s
        while True:
            if self._clock is not None and self._clock.left_ns() <= 0:
                self._clock.tick(self._recording.start_ns)
            waiting = [n for n, p in self._publishers.items() if p.get_subscription_count() == 0]
            if not waiting or time.monotonic() > limit or self._stopping.wait(0.02):
                return waiting

    def start(self) -> None:
        """Play in a thread of its own; an error is kept in `error`."""
        self._thread = threading.Thread(
            target=self._play_keeping_error, name='bag_player', daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the playing, wherever it is, and wait for the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def wait_until_received(self, timeout_s: float) -> None:
        """Give reliable subscribers so long to acknowledge; a program may end afterwards."""
        from rclpy.duration import Duration

        limit = time.monotonic() + timeout_s
        for publisher in self._publishers.values():
            left_s = max(0.0, limit - time.monotonic())
            publisher.wait_for_all_acked(Duration(seconds=left_s))

    @property
    def is_playing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _play_keeping_error(self) -> None:
        try:
            self.play()
        except BagError as error:
            self.error = error

    def play(self) -> None:
        """Publish everything once, or until `stop` if it loops. Raises BagError."""
        steady_ns = time.monotonic_ns()
        while not self._stopping.is_set():
            shift_ns = self.repetition * self._pass_ns if self._loop == 'onward' else 0
            self._anchor = (self._recording.start_ns + shift_ns, steady_ns)
            self._play_once(shift_ns)
            if not self._loop or self._stopping.is_set():
                return
            # The next repetition begins when this one should have ended, not when it did.
            steady_ns += round(self._pass_ns / self._rate)
            self._pace_to(self._recording.start_ns + shift_ns + self._pass_ns)
            self.repetition += 1

    def _play_once(self, shift_ns: int) -> None:
        for name, time_ns, data in self._recording.messages(self.topics):
            if time_ns > self._end_ns or not self._pace_to(time_ns + shift_ns):
                return
            if shift_ns and name in self._stamped:
                data = shift_stamp(data, shift_ns)
            self._publishers[name].publish(data)
            self.num_published += 1
        self._pace_to(self._end_ns + shift_ns)

    def _pace_to(self, bag_ns: int) -> bool:
        """Wait for a bag time, with the clock ticking; False if stopped meanwhile."""
        start_ns, steady_ns = self._anchor
        due_ns = steady_ns + round((bag_ns - start_ns) / self._rate)
        while True:
            # Also when the messages are behind time, or the clock would stop while they catch up.
            if self._clock is not None and self._clock.left_ns() <= 0:
                self._clock.tick(min(self.now_ns, bag_ns))
            left_ns = due_ns - time.monotonic_ns()
            if left_ns <= 0:
                return not self._stopping.is_set()
            if self._clock is not None:
                left_ns = min(left_ns, max(self._clock.left_ns(), 0))
            if self._stopping.wait(left_ns / 1e9):
                return False


class _ClockPublisher:
    """/clock at a steady rate; a tick that is late is not made up for, and the phase is kept."""

    def __init__(self, node: Any, hz: float) -> None:
        from rosgraph_msgs.msg import Clock

        self._message = Clock()
        # Reliable, so that it reaches whoever asks for that, too.
        self._publisher = node.create_publisher(Clock, '/clock', 10)
        self._period_ns = round(NS_PER_S / hz)
        self._due_ns = 0

    def left_ns(self) -> int:
        return self._due_ns - time.monotonic_ns()

    def tick(self, bag_ns: int) -> None:
        now_ns = time.monotonic_ns()
        missed = max(0, now_ns - self._due_ns) // self._period_ns
        self._due_ns = self._due_ns + (missed + 1) * self._period_ns if self._due_ns else now_ns
        stamp = self._message.clock
        stamp.sec, stamp.nanosec = divmod(bag_ns, NS_PER_S)
        self._publisher.publish(self._message)


# ---- the program


def main(args: list[str] | None = None) -> int:
    """Play a recording from the command line; 2 is the exit code of anything that cannot be."""
    options = _parse(sys.argv[1:] if args is None else args)
    try:
        recording = Recording(options.bag)
        return _play(recording, _published_names(recording, options), options)
    except BagError as error:
        print(f'oxygen_play: {error}', file=sys.stderr)
        return 2


def _parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='oxygen_play', description='Play a rosbag2 recording into the graph.'
    )
    parser.add_argument('bag', type=Path, help='folder of the recording, or its .mcap or .db3 file')
    parser.add_argument('--topics', nargs='+', metavar='TOPIC', help='only these (default: all)')
    parser.add_argument(
        '--remap', nargs='+', default=[], metavar='OLD:=NEW', help='publish OLD under the name NEW'
    )
    parser.add_argument(
        '--clock',
        type=_positive,
        nargs='?',
        const=DEFAULT_CLOCK_HZ,
        default=0.0,
        metavar='HZ',
        help=f'publish /clock, the log time, so often [1/s] (default {DEFAULT_CLOCK_HZ:g})',
    )
    parser.add_argument(
        '--rate', type=_positive, default=1.0, help='bag seconds per second (default 1)'
    )
    parser.add_argument(
        '--loop',
        nargs='?',
        const='back',
        default='',
        choices=('back', 'onward'),
        help='repeat: "back" lets the clock jump back (default), "onward" lets time go on by '
        'shifting header stamps',
    )
    parser.add_argument(
        '--duration', type=_positive, metavar='S', help='play only the first S bag seconds'
    )
    parser.add_argument(
        '--wait',
        type=float,
        default=3.0,
        metavar='S',
        help='wait at most so long for a subscriber of each topic (default 3)',
    )
    return parser.parse_args(args)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float('inf'):
        raise argparse.ArgumentTypeError(f'expected a value above 0, got {text}')
    return value


def _published_names(recording: Recording, options: argparse.Namespace) -> dict[str, str]:
    """Recorded name -> published name, as asked for."""
    remapped: dict[str, str] = {}
    for rule in options.remap:
        old, separator, new = rule.partition(':=')
        if not (old and separator and new):
            raise BagError(f'--remap: expected OLD:=NEW, got {rule!r}')
        remapped[_absolute(old)] = new
    names = [_absolute(name) for name in options.topics or recording.topics]
    recording.check_topics([*names, *remapped])
    return {name: remapped.get(name, name) for name in names}


def _absolute(topic: str) -> str:
    return topic if topic.startswith('/') else f'/{topic}'


def _play(recording: Recording, topics: dict[str, str], options: argparse.Namespace) -> int:
    import rclpy
    from rclpy.exceptions import InvalidTopicNameException
    from rclpy.signals import SignalHandlerOptions

    # Python's own handler, so that Ctrl-C wakes the waits below instead of breaking publishers.
    rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
    node = rclpy.create_node('oxygen_play')
    player = None
    try:
        player = BagPlayer(
            node,
            recording,
            topics,
            rate=options.rate,
            clock_hz=options.clock,
            loop=options.loop,
            duration_s=options.duration,
        )
        return _play_and_tell(player, recording, options.wait)
    except InvalidTopicNameException as error:
        raise BagError(f'--remap: {error}'.splitlines()[0]) from None
    except KeyboardInterrupt:
        return 130
    finally:
        if player is not None:
            player.stop()
        node.destroy_node()
        rclpy.try_shutdown()


def _play_and_tell(player: BagPlayer, recording: Recording, wait_s: float) -> int:
    for name, type_name in player.skipped.items():
        print(f'skipping {name}: {type_name} is not installed here', file=sys.stderr)
    if not player.topics:
        raise BagError(f'{recording.path}: none of the topics can be published')
    if unheard := player.wait_for_subscribers(wait_s):
        more = f' and {len(unheard) - 5} more' if len(unheard) > 5 else ''
        print(f'no subscriber (yet): {", ".join(unheard[:5])}{more}', file=sys.stderr)
    player.start()
    _show_progress(player, recording)
    if player.error is not None:
        raise player.error
    player.wait_until_received(2.0)
    return 0


def _show_progress(player: BagPlayer, recording: Recording) -> None:
    """One line that is rewritten on a terminal, otherwise one line at the end."""
    is_terminal = sys.stderr.isatty()
    while player.is_playing:
        if is_terminal:
            print(f'\r{_progress(player, recording)}', end='', file=sys.stderr, flush=True)
        time.sleep(0.1)
    start = '\r' if is_terminal else ''
    print(f'{start}{_progress(player, recording)}', file=sys.stderr)


def _progress(player: BagPlayer, recording: Recording) -> str:
    repetition = f', repetition {player.repetition + 1}' if player.repetition else ''
    return (
        f'{recording.path.name}: {player.position_s:.1f} of {recording.duration_s:.1f} s, '
        f'{player.num_published} messages on {len(player.topics)} topics{repetition}'
    )


if __name__ == '__main__':
    sys.exit(main())
