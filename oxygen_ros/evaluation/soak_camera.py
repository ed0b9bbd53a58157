"""A camera in a process of its own, so that a soak can stop and kill it as a driver dies.

Owns one publisher of noise. Knows nothing of the node; `soak.py` starts it, with the topic as its
parameter.
"""

from __future__ import annotations

import array
import sys
import time

import numpy as np

from oxygen_ros.conversions import ns_to_stamp

CAMERA_HZ = 30.0
HEIGHT, WIDTH = 48, 64


def noise(seed: int, height: int = HEIGHT, width: int = WIDTH) -> array.array[int]:
    """The bytes of an rgb8 picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, 3 * height * width, np.uint8)
    return array.array('B', pixels.tobytes())


def main() -> int:
    """Publish until the process is ended from outside."""
    import rclpy
    from rclpy.executors import ExternalShutdownException
    from rclpy.qos import qos_profile_sensor_data
    from sensor_msgs.msg import Image

    rclpy.init(args=sys.argv)
    node = rclpy.create_node('camera')
    topic: str = node.declare_parameter('topic', '').value
    publisher = node.create_publisher(Image, topic, qos_profile_sensor_data)
    message = Image(height=HEIGHT, width=WIDTH, encoding='rgb8', step=3 * WIDTH, data=noise(1))

    def publish() -> None:
        message.header.stamp = ns_to_stamp(time.time_ns())
        publisher.publish(message)

    node.create_timer(1 / CAMERA_HZ, publish)
    try:
        rclpy.spin(node)
    except (KeyboardInterrupt, ExternalShutdownException):
        return 0
    return 0


if __name__ == '__main__':
    sys.exit(main())
