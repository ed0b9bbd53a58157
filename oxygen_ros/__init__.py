"""One look at the world per tick: the robot acts, talks and remembers from a shared prefix.

This file only joins the two halves of the package: the Python modules here and the message
classes that rosidl generates into `oxygen_ros.msg`. Every ROS tool imports it on the way to the
messages, so it stays light.
"""

from pkgutil import extend_path

# In a source checkout the generated half lies below install/, in another folder of this name.
__path__ = extend_path(__path__, __name__)
