"""conversions.py against recordings, hand-made messages and random ones."""

from __future__ import annotations

import io
import math
import struct
import subprocess
import sys
import zlib
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image as PilImage

from oxygen_ros.conversions import (
    ConversionError,
    assumed_encoding,
    check_image,
    command_message,
    decode_image,
    joint_positions,
    ns_to_stamp,
    stamp_to_ns,
    supported_encodings,
)
from oxygen_ros.profile import CameraProfile, CommandProfile, JointsProfile

RED = (255, 0, 0)


def camera(
    transport: str = 'raw', encoding: str = '', rotate_180: bool = False, topic: str = 'cam'
) -> CameraProfile:
    return CameraProfile(
        slot='base_0_rgb',
        topic=topic,
        transport=transport,  # type: ignore[arg-type]
        encoding=encoding,
        rotate_180=rotate_180,
        max_age_s=0.5,
    )


def raw(
    encoding: str,
    pixels: np.ndarray,
    step: int | None = None,
    is_bigendian: int = 0,
    data: bytes | None = None,
) -> SimpleNamespace:
    """Return an Image of pixels (h, w) or (h, w, channels); data replaces their bytes."""
    tight = pixels.strides[0]
    return SimpleNamespace(
        height=pixels.shape[0],
        width=pixels.shape[1],
        encoding=encoding,
        is_bigendian=is_bigendian,
        step=tight if step is None else step,
        data=array('B', pixels.tobytes() if data is None else data),
    )


def compressed(data: bytes, label: str = 'jpeg') -> SimpleNamespace:
    return SimpleNamespace(format=label, data=array('B', data))


def encode(suffix: str, rgb: np.ndarray, *parameters: int) -> bytes:
    """Compress an RGB or one-channel picture."""
    stored = cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR) if rgb.ndim == 3 else rgb
    ok, data = cv2.imencode(suffix, stored, list(parameters))
    assert ok
    return data.tobytes()


def smooth_scene(height: int = 48, width: int = 64) -> np.ndarray:
    """Return an RGB picture with gradients and without edges, different in every corner."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    return np.stack([40 + 180 * x, 30 + 200 * y, 220 - 160 * x * y], axis=-1).astype(np.uint8)


def mean_error(picture: np.ndarray, truth: np.ndarray) -> float:
    return float(np.abs(picture.astype(int) - truth.astype(int)).mean())


def reason_of(message: Any, profile: CameraProfile) -> str:
    """Return the reason for which both the check and the decoder, or the latter alone, refuse."""
    with pytest.raises(ConversionError) as refused:
        decode_image(message, profile)
    assert profile.topic in str(refused.value)
    return refused.value.reason


# ---- recordings


@pytest.fixture(scope='session')
def recorded() -> Any:
    rosbags_highlevel = pytest.importorskip('rosbags.highlevel')
    from rosbags.typesys import Stores, get_typestore

    def read(path: Path) -> list[tuple[str, Any]]:
        store = get_typestore(Stores.ROS2_HUMBLE)
        with rosbags_highlevel.AnyReader([path], default_typestore=store) as reader:
            return [
                (connection.topic, reader.deserialize(data, connection.msgtype))
                for connection, _, data in reader.messages()
            ]

    return read


@pytest.fixture
def odd(bags: Path, recorded: Any) -> dict[str, Any]:
    """Return one message per topic; none of them repeats."""
    return dict(recorded(bags / 'derived_odd_encodings'))


@pytest.fixture
def truth(odd: dict[str, Any]) -> np.ndarray:
    message = odd['/truth/rgb8']
    return message.data.reshape(message.height, message.width, 3)


@pytest.mark.parametrize(
    ('topic', 'largest_error'),
    [
        ('/truth/rgb8', 0),
        ('/raw/bgr8', 0),
        ('/raw/rgba8', 0),
        ('/raw/bgra8', 0),
        ('/raw/8UC3', 0),
        ('/raw/rgb8_padded', 0),
        ('/raw/rgb8_step0', 0),
        ('/raw/RGB8_uppercase', 0),
        ('/raw/zero_stamp', 0),
        ('/raw/rgb16', 0),
        ('/raw/rgb16_bigendian', 0),
        ('/raw/yuv422_yuy2', 3),
        ('/raw/yuyv', 3),
        ('/raw/yuv422_uyvy', 3),
        ('/raw/uyvy', 3),
        ('/raw/bayer_rggb8', 12),
    ],
)
def test_every_recorded_encoding_gives_the_true_picture(
    odd: dict[str, Any], truth: np.ndarray, topic: str, largest_error: float
) -> None:
    picture = decode_image(odd[topic], camera(topic=topic))
    assert (picture.dtype, picture.shape) == (np.uint8, truth.shape)
    assert picture.flags.c_contiguous
    assert mean_error(picture, truth) <= largest_error


@pytest.mark.parametrize('topic', ['/raw/mono8', '/raw/8UC1', '/raw/mono8_padded'])
def test_recorded_grey_pictures_are_repeated_to_three_channels(
    odd: dict[str, Any], truth: np.ndarray, topic: str
) -> None:
    picture = decode_image(odd[topic], camera(topic=topic))
    grey = cv2.cvtColor(truth, cv2.COLOR_RGB2GRAY)
    assert mean_error(picture, np.repeat(grey[..., None], 3, axis=-1)) < 1


def test_the_recorded_mono16_picture_keeps_its_high_byte(odd: dict[str, Any]) -> None:
    message = odd['/raw/mono16']
    values = message.data.view('<u2').reshape(message.height, message.width)
    picture = decode_image(message, camera())
    assert (picture == (values >> 8)[..., None]).all()
    assert picture.max() > 0


@pytest.mark.parametrize(
    ('topic', 'reason'),
    [
        ('/raw/16UC1', 'image_depth'),
        ('/raw/32FC1', 'image_depth'),
        ('/raw/empty_encoding', 'image_encoding'),
        ('/raw/rgb8_short_data', 'image_truncated'),
        ('/raw/zero_size', 'image_size'),
    ],
)
def test_unusable_recorded_images_are_refused_at_arrival(
    odd: dict[str, Any], topic: str, reason: str
) -> None:
    with pytest.raises(ConversionError, match=topic) as refused:
        check_image(odd[topic], camera(topic=topic))
    assert refused.value.reason == reason


def test_an_empty_encoding_is_readable_with_an_override(
    odd: dict[str, Any], truth: np.ndarray
) -> None:
    picture = decode_image(odd['/raw/empty_encoding'], camera(encoding='rgb8'))
    assert mean_error(picture, truth) == 0


@pytest.mark.parametrize(
    'topic',
    [
        '/comp/jpeg',
        '/comp/jpg_uppercase',
        '/comp/empty_format',
        '/comp/rgb8_jpeg_bgr8',
        '/comp/png',
        '/comp/bgr8_png_bgr8',
        '/comp/png_labelled_jpeg',
    ],
)
def test_recorded_compressed_images_are_read_by_their_bytes_whatever_the_label(
    odd: dict[str, Any], truth: np.ndarray, topic: str
) -> None:
    assert mean_error(decode_image(odd[topic], camera('compressed')), truth) < 3


@pytest.mark.parametrize('topic', ['/comp/mono8_jpeg', '/comp/yuy2_mono8_bug'])
def test_a_recorded_grey_jpeg_is_grey_in_three_channels(odd: dict[str, Any], topic: str) -> None:
    picture = decode_image(odd[topic], camera('compressed'))
    assert picture.shape[-1] == 3
    assert (picture == picture[..., :1]).all()


@pytest.mark.parametrize(
    ('topic', 'reason'),
    [
        ('/comp/jpeg_truncated', 'image_truncated'),
        ('/comp/jpeg_10_bytes', 'image_truncated'),
        ('/comp/empty', 'image_truncated'),
        ('/comp/16UC1_compressedDepth', 'image_depth'),
        ('/comp/compressedDepth_old', 'image_depth'),
    ],
)
def test_unusable_recorded_compressed_images_are_refused_at_arrival(
    odd: dict[str, Any], topic: str, reason: str
) -> None:
    with pytest.raises(ConversionError, match=topic) as refused:
        check_image(odd[topic], camera('compressed', topic=topic))
    assert refused.value.reason == reason


@pytest.mark.parametrize('bag', ['geocam_sqlite3', 'geocam_mcap'])
def test_a_bag_with_30_byte_images_and_10_byte_jpegs_gives_only_refusals(
    bags: Path, recorded: Any, bag: str
) -> None:
    reasons = []
    for topic, message in recorded(bags / bag):
        if topic == '/test/sensor_msgs/image':
            reasons.append(reason_of(message, camera(topic=topic)))
        if topic == '/test/sensor_msgs/compressed_image':
            reasons.append(reason_of(message, camera('compressed', topic=topic)))
    assert reasons == ['image_truncated'] * 4


@pytest.mark.case(2)
def test_a_real_vga_picture_between_damaged_ones_is_exact(bags: Path, recorded: Any) -> None:
    pictures = [decode_image(m, camera()) for _, m in recorded(bags / 'derived_amber_640x480')]
    sources = [m.data.reshape(480, 640, 3) for _, m in recorded(bags / 'derived_amber_640x480')]
    assert len(pictures) == 2
    assert all((a == b).all() for a, b in zip(pictures, sources, strict=True))


# ---- colour order and layout


@pytest.mark.case(3)
@pytest.mark.parametrize(
    ('encoding', 'pixel'),
    [
        ('rgb8', (255, 0, 0)),
        ('bgr8', (0, 0, 255)),
        ('BGR8', (0, 0, 255)),
        (' bgr8 ', (0, 0, 255)),
        ('rgba8', (255, 0, 0, 7)),
        ('bgra8', (0, 0, 255, 7)),
        ('8UC3', (0, 0, 255)),
        ('8UC4', (0, 0, 255, 7)),
    ],
)
def test_pure_red_is_red_in_every_colour_encoding(encoding: str, pixel: tuple[int, ...]) -> None:
    pixels = np.full((4, 6, len(pixel)), pixel, np.uint8)
    assert (decode_image(raw(encoding, pixels), camera()) == RED).all()


@pytest.mark.case(3)
@pytest.mark.parametrize('suffix', ['.jpg', '.png'])
def test_pure_red_is_red_in_compressed_images(suffix: str) -> None:
    data = encode(suffix, np.full((16, 16, 3), RED, np.uint8))
    picture = decode_image(compressed(data), camera('compressed'))
    assert np.abs(picture.astype(int) - RED).max() <= 2


@pytest.mark.case(9)
@pytest.mark.parametrize('encoding', ['rgb16', 'bgr16', 'rgba16', 'bgra16', 'mono16'])
def test_sixteen_bits_of_both_byte_orders_keep_the_high_byte(encoding: str) -> None:
    channels = {'rgb': 3, 'bgr': 3, 'rgba': 4, 'bgra': 4, 'mono': 1}[encoding[:-2]]
    values = np.random.default_rng(0).integers(0, 65536, (6, 8, channels), np.uint16)
    eight = raw(encoding.replace('16', '8'), (values >> 8).astype(np.uint8))
    little = raw(encoding, values.astype('<u2'))
    big = raw(encoding, values.astype('>u2'), is_bigendian=1)
    expected = decode_image(eight, camera())
    assert (decode_image(little, camera()) == expected).all()
    assert (decode_image(big, camera()) == expected).all()


# The first row of the mosaic, then the second, is the name; per pixel, which of R G B is measured.
PATTERNS = {'rggb': (0, 1, 1, 2), 'bggr': (2, 1, 1, 0), 'gbrg': (1, 2, 0, 1), 'grbg': (1, 0, 2, 1)}


@pytest.mark.case(10)
@pytest.mark.parametrize('bits', [8, 16])
@pytest.mark.parametrize('pattern', PATTERNS)
def test_every_bayer_pattern_is_demosaiced(pattern: str, bits: int) -> None:
    scene = smooth_scene()
    mosaic = np.empty(scene.shape[:2], np.uint8)
    for i, channel in enumerate(PATTERNS[pattern]):
        mosaic[i // 2 :: 2, i % 2 :: 2] = scene[i // 2 :: 2, i % 2 :: 2, channel]
    stored = mosaic if bits == 8 else mosaic.astype('<u2') << 8
    picture = decode_image(raw(f'bayer_{pattern}{bits}', stored), camera())
    assert mean_error(picture, scene) < 3


def yuyv_of(scene: np.ndarray) -> np.ndarray:
    """Return the scene as Y U Y V bytes, (h, w, 2), ITU-R BT.601 with head room."""
    r, g, b = (scene[..., i].astype(float) for i in range(3))
    y = 16 + 0.257 * r + 0.504 * g + 0.098 * b
    u = 128 - 0.148 * r - 0.291 * g + 0.439 * b
    v = 128 + 0.439 * r - 0.368 * g - 0.071 * b
    packed = np.stack([y, u], axis=-1)
    packed[:, 1::2, 1] = v[:, ::2]
    return packed.round().astype(np.uint8)


@pytest.mark.case(4)
@pytest.mark.parametrize(
    ('encodings', 'swapped'),
    [
        (('yuv422_yuy2', 'yuyv', 'YUYV', 'yuy2', 'yuyv422'), False),
        (('yuv422', 'uyvy', 'UYVY', 'yuv422_uyvy', 'uyvy422'), True),
    ],
)
def test_both_yuv_layouts_are_read_in_all_their_spellings(
    encodings: tuple[str, ...], swapped: bool
) -> None:
    scene = smooth_scene()
    packed = yuyv_of(scene)
    pixels = np.ascontiguousarray(packed[..., ::-1]) if swapped else packed
    for encoding in encodings:
        assert mean_error(decode_image(raw(encoding, pixels), camera()), scene) < 3


@pytest.mark.case(5)
def test_a_wrong_yuv_label_is_believed_without_an_override_and_corrected_with_one() -> None:
    scene = smooth_scene()
    message = raw('uyvy', yuyv_of(scene))
    assert mean_error(decode_image(message, camera(encoding='yuyv')), scene) < 3
    assert mean_error(decode_image(message, camera()), scene) > 20


def test_an_odd_width_in_yuv_is_refused() -> None:
    assert reason_of(raw('yuyv', np.zeros((4, 5, 2), np.uint8)), camera()) == 'image_size'


@pytest.mark.case(4)
def test_an_unknown_encoding_is_refused_with_the_list_of_known_ones() -> None:
    message = raw('nv21', np.zeros((4, 4), np.uint8))
    with pytest.raises(ConversionError) as refused:
        check_image(message, camera(topic='/head/image_raw'))
    text = str(refused.value)
    assert refused.value.reason == 'image_encoding'
    assert '/head/image_raw' in text
    assert "'nv21'" in text
    assert all(name in text for name in supported_encodings())


@pytest.mark.case(9)
def test_depth_is_named_as_such_and_readable_only_by_an_override() -> None:
    values = np.full((4, 4), 0x8012, '<u2')
    assert reason_of(raw('16UC1', values), camera()) == 'image_depth'
    assert reason_of(raw('32FC1', values.astype('<f4')), camera()) == 'image_depth'
    assert (decode_image(raw('16UC1', values), camera(encoding='mono16')) == 0x80).all()


@pytest.mark.case(10)
@pytest.mark.parametrize(
    ('encoding', 'override', 'assumed'),
    [('8UC3', '', 'bgr8'), ('8uc1', '', 'mono8'), ('8UC3', 'rgb8', None), ('rgb8', '', None)],
)
def test_an_assumed_order_is_told_and_an_override_settles_it(
    encoding: str, override: str, assumed: str | None
) -> None:
    message = raw(encoding, np.full((2, 2, 3), RED, np.uint8))
    assert assumed_encoding(message, camera(encoding=override)) == assumed
    if override == 'rgb8':
        assert (decode_image(message, camera(encoding=override)) == RED).all()


def test_a_camera_mounted_upside_down_is_turned_in_both_transports() -> None:
    scene = smooth_scene()
    turned = decode_image(raw('rgb8', scene), camera(rotate_180=True))
    assert turned.flags.c_contiguous
    assert (turned == scene[::-1, ::-1]).all()
    png = compressed(encode('.png', scene))
    assert (decode_image(png, camera('compressed', rotate_180=True)) == turned).all()


# ---- sizes


@pytest.mark.case(2)
def test_a_step_of_zero_means_tight_rows_if_the_data_suffice() -> None:
    scene = smooth_scene()
    assert (decode_image(raw('rgb8', scene, step=0), camera()) == scene).all()
    short = raw('rgb8', scene, step=0, data=scene.tobytes()[:-1])
    assert reason_of(short, camera()) == 'image_truncated'


@pytest.mark.parametrize('padding', [1, 64])
def test_padded_rows_are_cut_not_sheared(padding: int) -> None:
    scene = smooth_scene()
    rows = np.full((48, 64 * 3 + padding), 99, np.uint8)
    rows[:, : 64 * 3] = scene.reshape(48, -1)
    message = raw('rgb8', scene, step=rows.shape[1], data=rows.tobytes())
    assert (decode_image(message, camera()) == scene).all()


@pytest.mark.case(2)
def test_surplus_bytes_behind_the_picture_are_ignored() -> None:
    scene = smooth_scene()
    message = raw('rgb8', scene, data=scene.tobytes() + bytes(10_000_000))
    assert (decode_image(message, camera()) == scene).all()


def test_a_step_shorter_than_a_row_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConversionError, match=r'at least 192 bytes.*got 190') as refused:
        check_image(raw('rgb8', smooth_scene(), step=190), camera())
    assert refused.value.reason == 'image_size'


@pytest.mark.case(2)
@pytest.mark.parametrize('field', ['height', 'width'])
def test_a_picture_without_pixels_is_refused(field: str) -> None:
    message = raw('rgb8', smooth_scene())
    setattr(message, field, 0)
    assert reason_of(message, camera()) == 'image_size'


@pytest.mark.case(12)
def test_the_check_at_arrival_touches_no_pixel() -> None:
    class OnlyLength:
        def __len__(self) -> int:
            return 720 * 1280 * 3

    message = raw('rgb8', np.zeros((720, 1280, 3), np.uint8))
    message.data = OnlyLength()
    check_image(message, camera())


# ---- compressed


@pytest.mark.case(6)
def test_the_same_bytes_decode_the_same_under_every_label() -> None:
    data = encode('.jpg', smooth_scene())
    labels = ['', 'jpeg', 'JPG', 'rgb8; jpeg compressed bgr8', 'png']
    labels += ['yuv422_yuy2; jpeg compressed mono8']
    first, *others = [
        decode_image(compressed(data, label), camera('compressed')) for label in labels
    ]
    assert all((picture == first).all() for picture in others)


@pytest.mark.parametrize('suffix', ['.jpg', '.png'])
@pytest.mark.parametrize('share', [0.02, 0.6, 0.99])
def test_a_truncated_file_is_refused_at_arrival(suffix: str, share: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8)
    data = encode(suffix, noise)
    with pytest.raises(ConversionError) as refused:
        check_image(compressed(data[: int(len(data) * share)]), camera('compressed'))
    assert refused.value.reason == 'image_truncated'


def test_padding_behind_the_end_marker_is_accepted() -> None:
    data = encode('.jpg', smooth_scene())
    padded = decode_image(compressed(data + bytes(1000)), camera('compressed'))
    assert (padded == decode_image(compressed(data), camera('compressed'))).all()


def test_a_png_damaged_in_the_middle_is_refused_by_the_decoder_only() -> None:
    data = bytearray(encode('.png', smooth_scene()))
    data[len(data) // 2 : len(data) // 2 + 20] = bytes(20)
    message = compressed(bytes(data))
    check_image(message, camera('compressed'))
    assert reason_of(message, camera('compressed')) == 'image_decode'


def test_a_png_that_claims_a_gigantic_size_is_refused() -> None:
    data = encode('.png', smooth_scene())
    header = b'IHDR' + struct.pack('>II', 60_000, 60_000) + data[24:29]
    claimed = data[:12] + header + struct.pack('>I', zlib.crc32(header)) + data[33:]
    assert reason_of(compressed(claimed, 'png'), camera('compressed')) == 'image_size'


@pytest.mark.parametrize(
    'prefix', [b'', b'\xff\xfe\x00\x02junk', b'\xff\xd8', b'\xff\xfe\x00\x08\xff\xc0skip']
)
def test_a_jpeg_that_claims_a_gigantic_size_is_refused_at_arrival(prefix: bytes) -> None:
    data = encode('.jpg', smooth_scene())
    sizes = data.index(b'\xff\xc0') + 5
    claimed = (
        data[:2] + prefix + data[2:sizes] + struct.pack('>HH', 30_000, 30_001) + data[sizes + 4 :]
    )
    with pytest.raises(
        ConversionError, match=r'JPEG of \d+ bytes that claims 30001x30000'
    ) as refused:
        check_image(compressed(claimed), camera('compressed'))
    assert refused.value.reason == 'image_size'


def test_bytes_that_are_no_picture_are_refused_and_shown() -> None:
    with pytest.raises(ConversionError, match='47 49 46 38') as refused:
        check_image(compressed(b'GIF89a' + bytes(20)), camera('compressed'))
    assert refused.value.reason == 'image_format'


@pytest.mark.case(7)
@pytest.mark.parametrize('label', ['16UC1; compressedDepth png', '', 'png'])
def test_compressed_depth_is_refused_with_the_topic_to_use(label: str) -> None:
    depth = encode('.png', np.arange(64, dtype=np.uint16).reshape(8, 8))
    with pytest.raises(ConversionError, match=r'compressedDepth topic.*use \.\.\./compressed'):
        check_image(compressed(bytes(12) + depth, label), camera('compressed'))


def test_a_sixteen_bit_grey_png_is_depth_unless_it_is_declared_grey() -> None:
    data = encode('.png', np.full((8, 8), 0x40FF, np.uint16))
    assert (
        reason_of(compressed(data, '16UC1; png compressed '), camera('compressed')) == 'image_depth'
    )
    assert reason_of(compressed(data, 'png'), camera('compressed')) == 'image_depth'
    assert (
        decode_image(compressed(data, 'mono16; png compressed '), camera('compressed')) == 64
    ).all()
    assert (decode_image(compressed(data, 'png'), camera('compressed', 'mono16')) == 64).all()


def test_a_sixteen_bit_colour_png_keeps_the_high_byte() -> None:
    scene = smooth_scene()
    data = encode('.png', scene.astype(np.uint16) << 8 | 0xFF)
    assert (
        decode_image(compressed(data, 'rgb16; png compressed bgr16'), camera('compressed')) == scene
    ).all()


def test_a_compressed_mosaic_is_demosaiced_never_fed_as_grey() -> None:
    scene = smooth_scene()
    mosaic = scene[..., 1].copy()
    mosaic[::2, ::2] = scene[::2, ::2, 0]
    mosaic[1::2, 1::2] = scene[1::2, 1::2, 2]
    data = encode('.png', mosaic)
    labelled = decode_image(compressed(data, 'bayer_rggb8; png compressed '), camera('compressed'))
    declared = decode_image(compressed(data, 'png'), camera('compressed', 'bayer_rggb8'))
    assert mean_error(labelled, scene) < 3
    assert (labelled == declared).all()


def test_a_driver_that_compresses_swapped_channels_is_corrected_by_an_override() -> None:
    scene = smooth_scene()
    data = encode('.png', np.ascontiguousarray(scene[..., ::-1]))
    assert (decode_image(compressed(data), camera('compressed', 'bgr8')) == scene).all()


@pytest.mark.parametrize('mode', ['L', 'LA', 'P', 'RGBA', '1'])
def test_every_kind_of_png_gives_three_channels(mode: str) -> None:
    file = io.BytesIO()
    PilImage.fromarray(smooth_scene()).convert(mode).save(file, 'PNG')
    picture = decode_image(compressed(file.getvalue(), 'png'), camera('compressed'))
    assert picture.shape == (48, 64, 3)


def test_the_orientation_tag_is_ignored() -> None:
    file, tag = io.BytesIO(), PilImage.Exif()
    tag[0x0112] = 6  # "turn by 90 degrees to view"
    PilImage.fromarray(smooth_scene()).save(file, 'JPEG', exif=tag)
    picture = decode_image(compressed(file.getvalue()), camera('compressed'))
    assert mean_error(picture, smooth_scene()) < 3


# ---- anything at all


@st.composite
def random_images(draw: st.DrawFn) -> SimpleNamespace:
    known = st.sampled_from(supported_encodings())
    return SimpleNamespace(
        height=draw(st.integers(0, 9) | st.just(2**32 - 1)),
        width=draw(st.integers(0, 9) | st.just(2**32 - 1)),
        encoding=draw(known | known.map(str.upper) | st.text(max_size=8)),
        is_bigendian=draw(st.sampled_from([0, 1, 255])),
        step=draw(st.integers(0, 80) | st.just(2**32 - 1)),
        data=array('B', draw(st.binary(max_size=720))),
    )


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_images(), st.sampled_from(['', 'rgb8', 'yuyv', 'bayer_grbg8', '16UC1']))
def test_a_random_image_is_decoded_to_its_size_or_refused(
    message: SimpleNamespace, override: str
) -> None:
    try:
        picture = decode_image(message, camera(encoding=override))
    except ConversionError as error:
        assert error.reason.startswith('image_')
    else:
        assert picture.shape == (message.height, message.width, 3)
        assert picture.dtype == np.uint8
        assert picture.flags.c_contiguous


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(['tight', 'padded', 'zero']),
    st.sampled_from(supported_encodings()),
    st.integers(1, 8).map(lambda half: 2 * half),
    st.integers(1, 16),
)
def test_a_complete_image_of_any_encoding_is_always_decoded(
    rows: str, encoding: str, width: int, height: int
) -> None:
    row_bytes = 8 * width  # enough for four channels of two bytes
    step = {'tight': row_bytes, 'padded': row_bytes + 3, 'zero': 0}[rows]
    message = SimpleNamespace(
        height=height,
        width=width,
        encoding=encoding,
        is_bigendian=0,
        step=step,
        data=array('B', bytes(height * (row_bytes + 3))),
    )
    assert decode_image(message, camera()).shape == (height, width, 3)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(['.jpg', '.png']),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=5),
    st.floats(0, 1),
    st.sampled_from(['', 'jpeg', 'bayer_rggb8; png compressed ', '16UC1', ';;', 'mono16']),
)
def test_a_damaged_file_is_decoded_or_refused_but_never_crashes(
    suffix: str, damage: list[tuple[float, int]], kept: float, label: str
) -> None:
    data = bytearray(encode(suffix, smooth_scene(8, 8)))
    size = len(data)
    for place, value in damage:
        # The sizes in the header stay: a damaged one may ask for gigabytes.
        data[min(size - 1, 200 + int(place * size))] = value
    data = data if kept > 0.3 else data[: int(kept * size)]
    try:
        picture = decode_image(compressed(bytes(data), label), camera('compressed'))
    except ConversionError as error:
        assert error.reason.startswith('image_')
    else:
        assert picture.shape == (8, 8, 3)


@pytest.mark.case(11)
def test_decoding_needs_neither_cv_bridge_nor_ros_nor_torch() -> None:
    program = (
        'import sys\n'
        "for name in ('cv_bridge', 'rclpy', 'sensor_msgs', 'torch', 'rosbags'):\n"
        '    sys.modules[name] = None\n'
        'from types import SimpleNamespace as N\n'
        'from oxygen_ros.conversions import decode_image\n'
        "camera = N(topic='c', transport='raw', encoding='', rotate_180=False)\n"
        "image = N(encoding='bgr8', height=1, width=1, step=3, data=bytes([0, 0, 255]))\n"
        'print(decode_image(image, camera).tolist())\n'
    )
    root = Path(__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, '-c', program], cwd=root, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == '[[[255, 0, 0]]]'


# ---- joints

JOINTS = ('shoulder', 'elbow', 'gripper')


def joints_profile(assume_order: bool = False) -> JointsProfile:
    return JointsProfile(
        topic='/joint_states', names=JOINTS, max_age_s=0.2, assume_order=assume_order
    )


def joint_state(names: list[str], positions: list[float], velocity: Any = ()) -> SimpleNamespace:
    return SimpleNamespace(
        name=names, position=array('d', positions), velocity=array('d', velocity), effort=array('d')
    )


@pytest.mark.case(29)
def test_joints_are_found_by_name_in_any_order_and_others_are_ignored() -> None:
    truth = {'shoulder': 1.0, 'wheel_fl': 9.0, 'elbow': 2.0, 'wheel_fr': 8.0, 'gripper': 3.0}
    rng = np.random.default_rng(0)
    for _ in range(20):
        names = [str(name) for name in rng.permutation(list(truth))]
        message = joint_state(names, [truth[name] for name in names])
        positions = joint_positions(message, joints_profile())
        assert list(positions.items()) == [('shoulder', 1.0), ('elbow', 2.0), ('gripper', 3.0)]


@pytest.mark.case(32)
@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_a_position_that_is_no_number_is_left_out(value: float) -> None:
    message = joint_state(list(JOINTS), [0.5, value, 0.1], velocity=[math.nan] * 3)
    assert joint_positions(message, joints_profile()) == {'shoulder': 0.5, 'gripper': 0.1}


def test_a_message_of_other_joints_only_holds_nothing() -> None:
    assert joint_positions(joint_state(['wheel'], [1.0]), joints_profile()) == {}


def test_a_message_of_velocities_only_holds_nothing() -> None:
    message = joint_state(list(JOINTS), [], velocity=[0.0, 0.0, 0.0])
    assert joint_positions(message, joints_profile()) == {}


@pytest.mark.case(34)
def test_unnamed_positions_are_refused_unless_the_order_is_assumed_and_the_length_fits() -> None:
    message = joint_state([], [1.0, 2.0, 3.0])
    with pytest.raises(ConversionError, match=r'/joint_states.*assume_order') as refused:
        joint_positions(message, joints_profile())
    assert refused.value.reason == 'joints_unnamed'
    assert list(joint_positions(message, joints_profile(assume_order=True)).values()) == [1, 2, 3]
    with pytest.raises(ConversionError, match='exactly 3 of them, got 4') as refused:
        joint_positions(joint_state([], [1.0] * 4), joints_profile(assume_order=True))
    assert refused.value.reason == 'joints_unnamed'


@pytest.mark.case(34)
@pytest.mark.parametrize('num_positions', [1, 2, 4])
def test_positions_that_do_not_match_the_names_are_refused(num_positions: int) -> None:
    message = joint_state(list(JOINTS), [0.0] * num_positions)
    with pytest.raises(ConversionError, match=f'3 names, got {num_positions}') as refused:
        joint_positions(message, joints_profile())
    assert refused.value.reason == 'joints_length'


def test_a_joint_given_twice_is_refused() -> None:
    with pytest.raises(ConversionError, match='elbow') as refused:
        joint_positions(joint_state(['elbow', 'elbow'], [0.0, 1.0]), joints_profile())
    assert refused.value.reason == 'joints_duplicate'


@pytest.mark.case(29, 34)
def test_recorded_shuffled_joints_read_the_same_with_and_without_velocities(
    bags: Path, recorded: Any
) -> None:
    names = ('shoulder_pan', 'shoulder_lift', 'elbow', 'wrist_1', 'wrist_2', 'wrist_3', 'gripper')
    profile = JointsProfile(topic='/joint_states', names=names, max_age_s=0.2)
    messages = [m for t, m in recorded(bags / 'derived_camera_joint') if t == '/joint_states']
    read = [joint_positions(message, profile) for message in messages]
    assert len(read) == 100
    assert {tuple(m.name) for m in messages} != {tuple(messages[0].name)}  # they are shuffled
    assert any(len(m.velocity) == 0 for m in messages)
    missing = {i: set(names) - set(positions) for i, positions in enumerate(read)}
    assert {i: gone for i, gone in missing.items() if gone} == {
        40: {'elbow'},
        **{i: {'wrist_3'} for i in range(60, 65)},
    }
    # A swap of joints would show as a step. The motion is smooth (wrist_2 passes +pi once), the
    # largest step is that over wrist_3's gap.
    for name in names:
        values = np.unwrap([positions[name] for positions in read if name in positions])
        assert np.abs(np.diff(values)).max() < 0.15


# ---- stamps and commands


def test_real_ros_messages_read_like_recorded_ones() -> None:
    messages = pytest.importorskip('sensor_msgs.msg')
    scene = smooth_scene()
    image = messages.Image(height=48, width=64, step=192, encoding='rgb8', data=scene.tobytes())
    assert (decode_image(image, camera()) == scene).all()
    png = messages.CompressedImage(format='png', data=encode('.png', scene))
    assert (decode_image(png, camera('compressed')) == scene).all()
    state = messages.JointState(name=['elbow', 'shoulder'], position=[2.0, 1.0])
    assert joint_positions(state, joints_profile()) == {'shoulder': 1.0, 'elbow': 2.0}
    assert stamp_to_ns(image.header.stamp) == 0


def test_stamps_survive_the_way_there_and_back() -> None:
    pytest.importorskip('builtin_interfaces.msg')
    for time_ns in (0, 1, 999_999_999, 1_000_000_000, 1_700_000_000_123_456_789):
        assert stamp_to_ns(ns_to_stamp(time_ns)) == time_ns


def command(interface: str, quantity: tuple[str, ...] = ('position',) * 3) -> CommandProfile:
    return CommandProfile(
        interface=interface,  # type: ignore[arg-type]
        topic='commands',
        names=JOINTS,
        quantity=quantity,  # type: ignore[arg-type]
        rate_hz=50.0,
        lower=(-1.0,) * 3,
        upper=(1.0,) * 3,
        max_velocity=(1.0,) * 3,
    )


def trajectory_problem(message: Any, joints: tuple[str, ...], now_ns: int) -> str:
    """Say why joint_trajectory_controller would reject a message, '' if it would not.

    A re-implementation of its checks with its default parameters (no partial goals, no motion
    allowed at the end, no integration of velocities).
    """
    if sorted(message.joint_names) != sorted(joints):
        return 'joints are not those of the controller'
    if not message.points:
        return 'empty trajectory'
    last_ns = stamp_to_ns(message.points[-1].time_from_start)
    start_ns = stamp_to_ns(message.header.stamp)
    if start_ns != 0 and start_ns + last_ns < now_ns:
        return 'ends in the past'
    if any(velocity != 0 for velocity in message.points[-1].velocities):
        return 'moves at the end'
    before_ns = 0
    for i, point in enumerate(message.points):
        time_ns = stamp_to_ns(point.time_from_start)
        if time_ns <= before_ns:
            return f'time of point {i} is not after {before_ns}'
        before_ns = time_ns
        if len(point.positions) != len(joints):
            return f'positions of point {i}'
        if len(point.velocities) not in (0, len(joints)):
            return f'velocities of point {i}'
        if len(point.accelerations) not in (0, len(joints)):
            return f'accelerations of point {i}'
        if len(point.effort) != 0:
            return f'effort of point {i}'
    return ''


@pytest.mark.case(42)
@pytest.mark.parametrize('now_ns', [0, 5, 1_700_000_000 * 10**9])
@pytest.mark.parametrize('period_s', [1e-3, 0.02, 1 / 3, 1 / 15, 10.0])
@pytest.mark.parametrize('num_rows', [1, 50])
def test_a_trajectory_passes_the_controllers_checks_at_any_time_and_rate(
    now_ns: int, period_s: float, num_rows: int
) -> None:
    pytest.importorskip('trajectory_msgs.msg')
    rows = np.arange(num_rows * 3, dtype=np.float64).reshape(-1, 3)
    message = command_message(command('joint_trajectory'), rows, period_s, stamp_ns=now_ns)
    assert trajectory_problem(message, JOINTS, now_ns) == ''
    assert stamp_to_ns(message.header.stamp) == 0
    assert [list(point.positions) for point in message.points] == rows.tolist()
    times_s = [stamp_to_ns(point.time_from_start) / 1e9 for point in message.points]
    assert times_s == pytest.approx([(i + 1) * period_s for i in range(num_rows)])


def test_the_reimplemented_checks_do_reject() -> None:
    pytest.importorskip('trajectory_msgs.msg')
    message = command_message(command('joint_trajectory'), np.zeros((2, 3)), 0.02)
    assert 'controller' in trajectory_problem(message, (*JOINTS, 'wrist'), 0)
    message.header.stamp = ns_to_stamp(1)
    assert 'past' in trajectory_problem(message, JOINTS, 10**9)
    message.points[0].time_from_start.nanosec = 0
    assert 'point 0' in trajectory_problem(message, JOINTS, 0)


@pytest.mark.parametrize('quantity', ['position', 'velocity'])
def test_a_joint_state_command_has_names_a_stamp_and_one_filled_array(quantity: str) -> None:
    pytest.importorskip('sensor_msgs.msg')
    profile = command('joint_state', (quantity,) * 3)
    message = command_message(profile, np.array([[0.1, 0.2, 0.3]]), 0.02, stamp_ns=7 * 10**9 + 5)
    assert list(message.name) == list(JOINTS)
    assert stamp_to_ns(message.header.stamp) == 7 * 10**9 + 5
    filled = {'position': list(message.position), 'velocity': list(message.velocity)}
    assert filled.pop(quantity) == [0.1, 0.2, 0.3]
    assert filled.popitem()[1] == []
    assert len(message.effort) == 0


def test_a_forward_command_keeps_the_order_and_says_it() -> None:
    pytest.importorskip('std_msgs.msg')
    profile = command('forward_command', ('velocity', 'velocity', 'position'))
    message = command_message(profile, np.array([[0.1, 0.2, 0.3]]), 0.02)
    assert list(message.data) == [0.1, 0.2, 0.3]
    (dim,) = message.layout.dim
    assert (dim.label, dim.size, dim.stride) == ('shoulder,elbow,gripper', 3, 3)


@pytest.mark.parametrize(
    ('interface', 'shape'),
    [
        ('joint_trajectory', (0, 3)),
        ('joint_trajectory', (5, 4)),
        ('joint_state', (2, 3)),
        ('forward_command', (2, 3)),
        ('forward_command', (3,)),
    ],
)
def test_rows_of_another_shape_make_no_command(interface: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match='expected'):
        command_message(command(interface), np.zeros(shape), 0.02)
