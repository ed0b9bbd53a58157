"""ROS messages to numpy and back; with node.py the only file that names message fields.

It owns the table of image encodings and what a joint state or a command must look like. It knows
no topic graph and no tensor, and takes messages by their fields alone, so that those of rclpy and
those read from a bag pass through the same code. The node and the bag evaluation call it.

OpenCV decodes (apt python3-opencv or opencv-python-headless): it has YUV, Bayer, JPEG and PNG.
cv_bridge and rosbags-image would add nothing: both shear padded rows and refuse some spellings,
so rows are unpadded and names normalised here in any case, and a compiled cv_bridge crashes under
another numpy than its own.
"""

from __future__ import annotations

import array
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from oxygen_ros.memory_store import StoredNote
from oxygen_ros.observation import ConversionError as ConversionError

if TYPE_CHECKING:
    from oxygen_ros.actions import ActionChunk
    from oxygen_ros.engine.engine import TextUpdate
    from oxygen_ros.monitor import Status
    from oxygen_ros.observation import ObservationBuffer
    from oxygen_ros.profile import CameraProfile, CommandProfile, JointsProfile

NS_PER_S = 1_000_000_000


# ---- stamps


def stamp_to_ns(stamp: Any) -> int:
    """Return a builtin_interfaces Time or Duration in nanoseconds."""
    return int(stamp.sec) * NS_PER_S + int(stamp.nanosec)


def ns_to_stamp(time_ns: int) -> Any:
    """Return nanoseconds as a builtin_interfaces Time."""
    from builtin_interfaces.msg import Time

    sec, nanosec = divmod(time_ns, NS_PER_S)
    return Time(sec=sec, nanosec=nanosec)


# ---- images


@dataclass(frozen=True)
class _Layout:
    """How one raw encoding lies in memory, and the OpenCV code that makes it RGB (None: it is)."""

    channels: int  # samples per pixel; a YUV 4:2:2 pixel has two
    sample_bytes: int
    to_rgb: int | None
    even_width: bool = False

    @property
    def pixel_bytes(self) -> int:
        return self.channels * self.sample_bytes


# OpenCV names a Bayer pattern by its second row, second column on; ROS by its top left corner.
_BAYER_TO_RGB = {
    'bayer_rggb': cv2.COLOR_BayerBG2RGB,
    'bayer_bggr': cv2.COLOR_BayerRG2RGB,
    'bayer_gbrg': cv2.COLOR_BayerGR2RGB,
    'bayer_grbg': cv2.COLOR_BayerGB2RGB,
}
_COLOUR_TO_RGB = {
    'rgb': (3, None),
    'bgr': (3, cv2.COLOR_BGR2RGB),
    'rgba': (4, cv2.COLOR_RGBA2RGB),
    'bgra': (4, cv2.COLOR_BGRA2RGB),
    'mono': (1, cv2.COLOR_GRAY2RGB),
    **{pattern: (1, code) for pattern, code in _BAYER_TO_RGB.items()},
}
_YUYV = _Layout(2, 1, cv2.COLOR_YUV2RGB_YUY2, even_width=True)
_UYVY = _Layout(2, 1, cv2.COLOR_YUV2RGB_UYVY, even_width=True)

_LAYOUTS: dict[str, _Layout] = {
    **{
        f'{name}{8 * sample_bytes}': _Layout(channels, sample_bytes, code)
        for sample_bytes in (1, 2)
        for name, (channels, code) in _COLOUR_TO_RGB.items()
    },
    # Humble's names (yuv422, yuv422_yuy2), those since Iron (uyvy, yuyv), and FFmpeg's.
    **dict.fromkeys(('yuv422_yuy2', 'yuyv', 'yuy2', 'yuyv422'), _YUYV),
    **dict.fromkeys(('yuv422', 'uyvy', 'yuv422_uyvy', 'uyvy422'), _UYVY),
}
# OpenCV's type names say nothing of the order of channels; what drivers nearly always mean by them.
_ASSUMED = {'8uc1': 'mono8', '8uc3': 'bgr8', '8uc4': 'bgra8'}
_DEPTH = ('16uc1', '16sc1', '32fc1', '64fc1')

_JPEG_START, _JPEG_END = b'\xff\xd8\xff', b'\xff\xd9'
_PNG_START, _PNG_END = b'\x89PNG\r\n\x1a\n', b'IEND'
_DEPTH_HEADER_BYTES = 12  # of compressedDepth, in front of the PNG
# MJPEG drivers pad the buffer behind the end marker.
_MAX_PADDING_BYTES = 4096

MAX_PIXELS = 2**26
"""Twice an 8K picture. A JPEG of 700 bytes may claim 30,000 x 30,000, which OpenCV then decodes to
the end: that took 36 s and 5 GB."""


def supported_encodings() -> tuple[str, ...]:
    """Return every spelling of a raw encoding that is understood, in lower case."""
    return tuple(sorted([*_LAYOUTS, *_ASSUMED]))


def assumed_encoding(msg: Any, camera: CameraProfile) -> str | None:
    """Return the order assumed for an encoding that leaves it open ('8UC3' -> 'bgr8'), else None.

    For the node to log once per camera; the profile's `encoding` overrides it.
    """
    if camera.transport == 'compressed':
        return None
    return _ASSUMED.get(_encoding(msg, camera))


def check_image(msg: Any, camera: CameraProfile) -> None:
    """Refuse an image that is certainly unusable; looks at no pixel, so callbacks can afford it.

    Raises ConversionError with one of the reasons image_encoding, image_depth, image_size,
    image_truncated, image_format.
    """
    if camera.transport == 'compressed':
        _check_compressed(msg, camera)
    else:
        _check_raw(msg, camera)


def decode_image(msg: Any, camera: CameraProfile) -> np.ndarray:
    """Decode an Image or CompressedImage to uint8 (h, w, 3) RGB, C-contiguous.

    The result may be a view of the message's data. Raises ConversionError: see check_image, and
    image_decode where OpenCV gives up.
    """
    check_image(msg, camera)
    try:
        if camera.transport == 'compressed':
            rgb = _decode_compressed(msg, camera)
        else:
            rgb = _decode_raw(msg, camera)
    except cv2.error as error:
        raise ConversionError(
            'image_decode', f'{camera.topic}: OpenCV cannot decode the image: {error.err}'
        ) from None
    if camera.rotate_180:
        rgb = rgb[::-1, ::-1]
    return np.ascontiguousarray(rgb)


def _encoding(msg: Any, camera: CameraProfile) -> str:
    return (camera.encoding or msg.encoding).strip().lower()


def _layout(msg: Any, camera: CameraProfile) -> _Layout:
    encoding = _encoding(msg, camera)
    layout = _LAYOUTS.get(_ASSUMED.get(encoding, encoding))
    if layout is not None:
        return layout
    if encoding in _DEPTH:
        raise ConversionError(
            'image_depth',
            f'{camera.topic}: expected a colour image, got {encoding!r}, which is depth; if it is '
            'grey after all, set the encoding of the camera in the profile',
        )
    raise ConversionError(
        'image_encoding',
        f'{camera.topic}: expected one of the encodings {", ".join(supported_encodings())}, '
        f'got {encoding!r}; if the driver mislabels it, set the encoding in the profile',
    )


def _check_raw(msg: Any, camera: CameraProfile) -> None:
    layout = _layout(msg, camera)
    if msg.height < 1 or msg.width < 1:
        raise ConversionError(
            'image_size', f'{camera.topic}: expected a picture, got {msg.width}x{msg.height} pixels'
        )
    if layout.even_width and msg.width % 2:
        raise ConversionError(
            'image_size', f'{camera.topic}: expected an even width for YUV 4:2:2, got {msg.width}'
        )
    row_bytes = msg.width * layout.pixel_bytes
    step = msg.step or row_bytes  # some publishers leave it 0
    if step < row_bytes:
        raise ConversionError(
            'image_size',
            f'{camera.topic}: expected a step of at least {row_bytes} bytes for {msg.width} pixels '
            f'of {_encoding(msg, camera)}, got {step}',
        )
    if len(msg.data) < step * msg.height:
        raise ConversionError(
            'image_truncated',
            f'{camera.topic}: expected {step} x {msg.height} = {step * msg.height} bytes, '
            f'got {len(msg.data)}',
        )


def _decode_raw(msg: Any, camera: CameraProfile) -> np.ndarray:
    layout = _layout(msg, camera)
    row_bytes = msg.width * layout.pixel_bytes
    step = msg.step or row_bytes
    data = np.frombuffer(msg.data, np.uint8, count=step * msg.height)
    rows = data.reshape(msg.height, step)[:, :row_bytes]  # (h, row_bytes), padding cut off
    if layout.sample_bytes == 2:
        rows = rows[:, 0 if msg.is_bigendian else 1 :: 2]  # the high byte is the value >> 8
    pixels = np.ascontiguousarray(rows).reshape(msg.height, msg.width, layout.channels)
    return pixels if layout.to_rgb is None else cv2.cvtColor(pixels, layout.to_rgb)


def _check_compressed(msg: Any, camera: CameraProfile) -> None:
    data = memoryview(msg.data)
    head = bytes(data[: _DEPTH_HEADER_BYTES + len(_PNG_START)])
    # The label may be wrong or empty, the bytes are not.
    if 'compresseddepth' in msg.format.lower() or head[_DEPTH_HEADER_BYTES:] == _PNG_START:
        raise ConversionError(
            'image_depth',
            f'{camera.topic}: expected a colour image, but this is a compressedDepth topic '
            f'(format {msg.format!r}); use .../compressed',
        )
    tail = bytes(data[-_MAX_PADDING_BYTES:])
    if head.startswith(_JPEG_START):
        kind, complete = 'JPEG', _JPEG_END in tail
    elif head.startswith(_PNG_START):
        kind, complete = 'PNG', _PNG_END in tail
    elif len(data) == 0:
        raise ConversionError(
            'image_truncated', f'{camera.topic}: expected JPEG or PNG, got 0 bytes'
        )
    else:
        raise ConversionError(
            'image_format',
            f'{camera.topic}: expected JPEG or PNG, got {len(data)} bytes that begin with '
            f'{head[:4].hex(" ")} (format {msg.format!r})',
        )
    if not complete:
        raise ConversionError(
            'image_truncated',
            f'{camera.topic}: expected a whole {kind}, got {len(data)} bytes without end marker',
        )
    width, height = _jpeg_size(data) if kind == 'JPEG' else _png_size(data)
    if width * height > MAX_PIXELS:
        raise ConversionError(
            'image_size',
            f'{camera.topic}: expected at most {MAX_PIXELS} pixels, got a {kind} of {len(data)} '
            f'bytes that claims {width}x{height}',
        )


def _png_size(data: memoryview) -> tuple[int, int]:
    """Width and height in the first chunk."""
    return int.from_bytes(data[16:20], 'big'), int.from_bytes(data[20:24], 'big')


def _jpeg_size(data: memoryview) -> tuple[int, int]:
    """Width and height in the frame header; (0, 0) where a decoder will not find one either."""
    at = 2
    while at + 9 <= len(data):
        marker = data[at + 1]
        if data[at] != 0xFF or marker in (0x00, 0xFF):
            at += 1  # as decoders do: bytes that are no marker are skipped
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = data[at + 5 : at + 7], data[at + 7 : at + 9]
            return int.from_bytes(width, 'big'), int.from_bytes(height, 'big')
        elif marker == 0x01 or 0xD0 <= marker <= 0xD9:
            at += 2  # these stand alone
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], 'big')
    return 0, 0


def _decode_compressed(msg: Any, camera: CameraProfile) -> np.ndarray:
    # The orientation tag is for photographs on a screen: training data was recorded without it.
    flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
    pixels = cv2.imdecode(np.frombuffer(msg.data, np.uint8), flags)
    if pixels is None:
        raise ConversionError(
            'image_decode',
            f'{camera.topic}: expected an intact JPEG or PNG, got {len(msg.data)} damaged bytes',
        )
    # The file itself defines red and blue. The label's first word ('bayer_rggb8; png compressed')
    # tells only what a single channel means, and whether 16 bits are brightness or depth.
    meaning = camera.encoding.strip().lower() or msg.format.split(';')[0].strip().lower()
    if pixels.dtype == np.uint16:
        if pixels.ndim == 2 and not meaning.startswith(('mono', 'bayer')):
            raise ConversionError(
                'image_depth',
                f'{camera.topic}: expected a colour image, got one channel of 16 bits, which is '
                f'depth (format {msg.format!r}); if it is grey, set encoding: mono16',
            )
        pixels = (pixels // 256).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise ConversionError(
            'image_depth', f'{camera.topic}: expected 8 or 16 bits, got {pixels.dtype} pixels'
        )
    if pixels.ndim == 2:
        bayer = _BAYER_TO_RGB.get(meaning.rstrip('0123456789'))
        return cv2.cvtColor(pixels, cv2.COLOR_GRAY2RGB if bayer is None else bayer)
    if camera.encoding.strip().lower() == 'bgr8':
        return (
            pixels  # a driver that gave its RGB picture to a BGR encoder: OpenCV's BGR is its RGB
        )
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)


# ---- joints


def joint_positions(msg: Any, joints: JointsProfile) -> dict[str, float]:
    """Return the positions (rad or m) of the profile's joints that a JointState holds, by name.

    Other joints are ignored; NaN, infinity and an empty position array mean "not available", such
    joints are left out. Raises ConversionError with one of the reasons joints_unnamed (unless
    assume_order and the length fits), joints_length, joints_duplicate.
    """
    names, positions = list(msg.name), msg.position
    if not names:
        names = _assumed_names(len(positions), joints)
    elif len(positions) not in (0, len(names)):  # the definition allows "no positions here"
        raise ConversionError(
            'joints_length',
            f'{joints.topic}: expected {len(names)} positions for {len(names)} names, '
            f'got {len(positions)}',
        )
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConversionError(
            'joints_duplicate', f'{joints.topic}: expected each joint once, got {twice} repeatedly'
        )
    found = {name: float(position) for name, position in zip(names, positions, strict=False)}
    return {name: found[name] for name in joints.names if math.isfinite(found.get(name, math.nan))}


def _assumed_names(num_positions: int, joints: JointsProfile) -> list[str]:
    if joints.assume_order and num_positions == len(joints.names):
        return list(joints.names)
    wish = (
        f'exactly {len(joints.names)} of them'
        if joints.assume_order
        else 'joint names (assume_order in the profile takes their order on trust)'
    )
    raise ConversionError(
        'joints_unnamed', f'{joints.topic}: expected {wish}, got {num_positions} unnamed positions'
    )


# ---- commands


def command_message(
    command: CommandProfile, rows: np.ndarray, period_s: float, stamp_ns: int = 0
) -> Any:
    """Return the message that commands rows, float (n, joints) in the order of command.names.

    joint_trajectory carries all rows, `period_s` apart and the first one period ahead. The other
    interfaces carry one row, and only joint_state is stamped (`stamp_ns`, ROS time).
    Raises ValueError on rows of another shape.
    """
    num_joints = len(command.names)
    if rows.ndim != 2 or rows.shape[0] < 1 or rows.shape[1] != num_joints:
        raise ValueError(
            f'{command.topic}: expected command rows of shape (n, {num_joints}), got {rows.shape}'
        )
    if command.interface == 'joint_trajectory':
        return _trajectory(command, rows, period_s)
    if rows.shape[0] != 1:
        raise ValueError(
            f'{command.topic}: expected one row for {command.interface}, got {rows.shape[0]}'
        )
    if command.interface == 'joint_state':
        return _joint_state(command, rows[0], stamp_ns)
    return _forward_command(command, rows[0])


def _trajectory(command: CommandProfile, rows: np.ndarray, period_s: float) -> Any:
    """Fill what joint_trajectory_controller accepts, which is picky about time."""
    from builtin_interfaces.msg import Duration
    from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

    trajectory = JointTrajectory(joint_names=list(command.names))
    # The header stamp stays 0, "start now": any other is refused once it has passed. Positions only
    # (the profile allows no other): the controller interpolates linearly and need not end at rest.
    for i, row in enumerate(rows):
        sec, nanosec = divmod(round((i + 1) * period_s * NS_PER_S), NS_PER_S)
        trajectory.points.append(
            JointTrajectoryPoint(
                positions=row.tolist(), time_from_start=Duration(sec=sec, nanosec=nanosec)
            )
        )
    return trajectory


def _joint_state(command: CommandProfile, row: np.ndarray, stamp_ns: int) -> Any:
    from sensor_msgs.msg import JointState

    message = JointState(name=list(command.names))
    message.header.stamp = ns_to_stamp(stamp_ns)
    # Filled arrays are as long as `name`, the others empty, which means "not commanded".
    if set(command.quantity) == {'position'}:
        message.position = row.tolist()
    else:
        message.velocity = row.tolist()
    return message


def _forward_command(command: CommandProfile, row: np.ndarray) -> Any:
    from std_msgs.msg import Float64MultiArray, MultiArrayDimension

    message = Float64MultiArray(data=row.tolist())
    label = ','.join(command.names)  # nothing else in the message tells a bag reader the order
    message.layout.dim = [MultiArrayDimension(label=label, size=len(row), stride=len(row))]
    return message


# ---- what the engine made


def image_message(pixels: np.ndarray, stamp_ns: int) -> Any:
    """Return uint8 (h, w, 3) RGB as sensor_msgs/Image, stamped with ROS time."""
    from sensor_msgs.msg import Image

    height, width, _ = pixels.shape
    # An array is copied in one go, bytes one by one.
    data = array.array('B', pixels.tobytes())
    message = Image(height=height, width=width, encoding='rgb8', step=3 * width, data=data)
    message.header.stamp = ns_to_stamp(stamp_ns)
    return message


def chunk_message(
    chunk: ActionChunk, names: Iterable[str], *, prefill_ms: float, denoise_ms: float
) -> Any:
    """Return the ActionChunk message of a chunk whose columns are `names`."""
    from oxygen_ros.msg import ActionChunk as Message

    message = Message(
        frame=chunk.frame,
        joint_names=list(names),
        period_s=chunk.period_ns / NS_PER_S,
        horizon=len(chunk.values),
        values=chunk.values.ravel().tolist(),
        prefill_ms=prefill_ms,
        denoise_ms=denoise_ms,
    )
    message.header.stamp = ns_to_stamp(chunk.stamp_ns)
    return message


def take_image(
    buffer: ObservationBuffer, message: Any, camera: CameraProfile, now_ns: int, ros_ns: int
) -> None:
    """Put an image where the frame thread finds it, or count why not; times as `put_image`."""
    try:
        check_image(message, camera)
    except ConversionError as error:
        buffer.count_drop(error.reason, camera.slot, str(error))
        return
    buffer.put_image(camera.slot, message, stamp_to_ns(message.header.stamp), now_ns, ros_ns)


def take_joints(
    buffer: ObservationBuffer, message: Any, joints: JointsProfile, now_ns: int, ros_ns: int
) -> None:
    """Put measured joints where the frame thread finds them, or count why not."""
    try:
        positions = joint_positions(message, joints)
    except ConversionError as error:
        buffer.count_drop(error.reason, 'joints', str(error))
        return
    buffer.put_joints(positions, stamp_to_ns(message.header.stamp), now_ns, ros_ns)


def text_message(update: TextUpdate) -> Any:
    """Return the Text message of one piece of news of a text."""
    from oxygen_ros.msg import Text

    message = Text(
        frame=update.frame,
        task=update.task,
        delta=update.delta,
        text=update.text,
        final=update.reason is not None,
        reason='' if update.reason is None else update.reason.value,
        num_tokens=update.num_tokens,
    )
    message.header.stamp = ns_to_stamp(update.stamp_ns)
    return message


def note_message(update: TextUpdate) -> Any:
    """Return the Note message of an ended memory note."""
    return stored_note_message(stored_note(update))


def stored_note(update: TextUpdate) -> StoredNote:
    """Return an ended memory note as it is kept."""
    return StoredNote(
        stamp_ns=update.stamp_ns,
        frame=update.frame,
        task=update.task,
        text=update.text,
        reason='' if update.reason is None else update.reason.value,
        num_tokens=update.num_tokens,
    )


def stored_note_message(note: StoredNote) -> Any:
    """Return the Note message of a note that was kept."""
    from oxygen_ros.msg import Note

    message = Note(
        frame=note.frame,
        task=note.task,
        text=note.text,
        reason=note.reason,
        num_tokens=note.num_tokens,
    )
    message.header.stamp = ns_to_stamp(note.stamp_ns)
    return message


def stats_message(stamp_ns: int, numbers: Mapping[str, float], drops: Mapping[str, int]) -> Any:
    """Return the EngineStats message with `numbers` by field name and `drops` by reason."""
    from oxygen_ros.msg import EngineStats

    message = EngineStats(
        drops=sum(drops.values()),
        drop_reasons=list(drops),
        drop_counts=list(drops.values()),
        **numbers,
    )
    message.header.stamp = ns_to_stamp(stamp_ns)
    return message


def diagnostics_message(
    stamp_ns: int, node_name: str, hardware_id: str, statuses: Iterable[Status]
) -> Any:
    """Return a DiagnosticArray; a status is named after the node, so two robots stay apart."""
    from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

    message = DiagnosticArray()
    message.header.stamp = ns_to_stamp(stamp_ns)
    for status in statuses:
        values = [KeyValue(key=key, value=str(value)) for key, value in status.values.items()]
        message.status.append(
            DiagnosticStatus(
                level=bytes([status.level]),
                name=f'{node_name}: {status.name}',
                message=status.message,
                hardware_id=hardware_id,
                values=values,
            )
        )
    return message
