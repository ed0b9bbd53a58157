"""For `pip install .`: the engine and the model in plain Python, without ROS.

On a robot `colcon build` installs the package by package.xml and CMakeLists.txt and does not read
this file. Messages, launch files and the node's executables come only that way.
"""

from setuptools import find_packages, setup

REPLAY = [
    'rosbags>=0.10',
    'opencv-python-headless>=4.5',
    'matplotlib>=3.5',
    'scikit-image>=0.22',
    'rich>=13',
]
SIMULATION = ['mujoco>=3.2', 'rich>=13']
# Only its scene files are read; `pip install --no-deps gym-aloha` leaves MuJoCo as it is.
ALOHA = ['mujoco>=3.2', 'gym-aloha>=0.1.1']
# In an environment of its own: LIBERO holds MuJoCo below 3.9 and robosuite at 1.4.0.
LIBERO = ['hf-libero==0.1.4', 'mujoco>=3.2,<3.9', 'rich>=13', 'matplotlib>=3.5']
RAY = ['ray>=2.9']
DEVELOPMENT = [
    'pytest>=7,<8.4',
    'pytest-xdist>=3',
    'hypothesis>=6',
    'ruff',
    'mypy',
    'types-PyYAML',
    'transformers<5',
]

setup(
    name='oxygen_ros',
    version='0.1.0',
    description='A π0.5 robot policy that acts, talks and remembers from one shared prefill',
    license='Apache-2.0',
    maintainer='oxygen_ros maintainers',
    maintainer_email='oxygen_ros@example.org',
    url='https://arxiv.org/abs/2603.14371',
    python_requires='>=3.10',
    packages=find_packages(include=['oxygen_ros', 'oxygen_ros.*']),
    install_requires=[
        'numpy>=1.21',
        'pillow>=9',
        'pyyaml>=5.4',
        'safetensors>=0.4',
        'sentencepiece>=0.1.99',
        'torch>=2.4',
    ],
    extras_require={
        'replay': REPLAY,
        'sim': SIMULATION,
        'aloha': ALOHA,
        'libero': LIBERO,
        'ray': REPLAY + RAY,
        'dev': REPLAY + SIMULATION + DEVELOPMENT,
    },
)
