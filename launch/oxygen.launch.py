"""Starts the oxygen node: `ros2 launch oxygen_ros oxygen.launch.py profile:=aloha checkpoint:=DIR`.

Values are taken in this order, later ones win: the node's own defaults, the parameter file, the
arguments given here. An argument that is left empty changes nothing.
"""

from __future__ import annotations

from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import LifecycleNode
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

# Arguments that become the node's parameter of the same name when they are given.
PARAMETERS = {
    'profile': (str, 'robot profile: a name in config/ (dummy, aloha, droid, libero) or a file'),
    'checkpoint': (str, 'folder of the checkpoint: model.safetensors, assets, tokenizer.model'),
    'openpi_config': (str, 'openpi training config to take transforms from, if openpi is there'),
    'device': (str, 'where the model runs: auto, cpu, cuda or cuda:N'),
    'dtype': (str, 'numbers the model computes with: auto, float32 or bfloat16'),
    'instruction': (str, 'what the robot should do until the instruction topic says otherwise'),
    'autostart': (bool, 'true: configure and activate at once; false: wait for lifecycle calls'),
    'dry_run': (bool, 'true: commands go to ~/would_be_command only, the robot stays still'),
    'use_sim_time': (bool, 'true: time comes from /clock, as in simulation and bag replay'),
}

# The node leaves the robot in its safe behaviour on SIGINT; give it this long before SIGTERM.
SIGTERM_TIMEOUT_S = '15'


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments, then start the node with those that were given."""
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                'params_file',
                default_value=PathJoinSubstitution(
                    [FindPackageShare('oxygen_ros'), 'config', 'oxygen.yaml']
                ),
                description='YAML file with parameters of the node',
            ),
            DeclareLaunchArgument(
                'namespace', default_value='', description='namespace of the node, one per robot'
            ),
            DeclareLaunchArgument(
                'log_level',
                default_value='info',
                choices=['debug', 'info', 'warn', 'error', 'fatal'],
                description='least severe log messages that are shown',
            ),
            *(
                DeclareLaunchArgument(name, default_value='', description=description)
                for name, (_, description) in PARAMETERS.items()
            ),
            OpaqueFunction(function=start_node),
        ]
    )


def start_node(context: LaunchContext) -> list[LifecycleNode]:
    """Build the node once the arguments are known.

    No respawn: a node that died must not resume motion by itself.
    """
    given = {
        name: ParameterValue(LaunchConfiguration(name), value_type=value_type)
        for name, (value_type, _) in PARAMETERS.items()
        if LaunchConfiguration(name).perform(context) != ''
    }
    return [
        LifecycleNode(
            package='oxygen_ros',
            executable='oxygen',
            name='oxygen',
            namespace=LaunchConfiguration('namespace'),
            parameters=[LaunchConfiguration('params_file'), given],
            ros_arguments=['--log-level', LaunchConfiguration('log_level')],
            output='screen',
            emulate_tty=True,
            sigterm_timeout=SIGTERM_TIMEOUT_S,
        )
    ]
