"""TabletopWorld: a small arm, a table and three coloured blocks, simulated and photographed.

Owns the scene, its physics, its pictures and the truth about both: where the blocks lie, what the
arm touches, what a perfect narrator would say. Knows no ROS, no tensor and no policy. The node that
plays the robot, the data collection and the evaluation drive it.

Axes: x from the robot towards the viewer, y to the right of the viewer's picture, z up, metres.
All words (near, far, left, right) are the viewer's, who sits opposite the robot.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

CAMERAS = ('base', 'side')
JOINTS = ('yaw', 'shoulder', 'elbow', 'wrist')
COLOURS = ('red', 'green', 'blue')
INSTRUCTIONS = (
    'touch the {} block',
    'go to the {} block',
    'tap the {} cube',
    'put your finger on the {} one',
)
"""The phrasings that the shipped model was trained on."""

CONTROL_HZ = 10
IMAGE_SIZE = 96

SHOULDER_M, UPPER_M, FOREARM_M, FINGER_M = 0.22, 0.26, 0.26, 0.10
LOWER_RAD = (-1.5, -0.6, 0.5, -0.7)
UPPER_RAD = (1.5, 1.7, 2.7, 2.0)
BLOCK_M = 0.06
TOUCH_M, TOUCH_S = 0.04, 0.5
"""The finger touches a block while it is this close to the middle of its top, as it is almost
everywhere over it, and has touched it after so long."""
SAY_TOUCHING_M = 0.06
"""Where the narrator says so: on the way down, where the finger passes quickly."""

RADII_M = {'far': (0.21, 0.27), 'near': (0.355, 0.42)}
YAWS_RAD = {'left': (-1.1, -0.56), 'middle': (-0.24, 0.24), 'right': (0.56, 1.1)}
"""Cells in which blocks lie; the gaps between them keep the words unambiguous."""
CELLS = tuple((row, column) for row in RADII_M for column in YAWS_RAD)

PHYSICS_S = 0.005


class GraphicsError(RuntimeError):
    """Pictures cannot be rendered here; the message names the package to install."""


def import_mujoco() -> Any:
    """Import MuJoCo with an off-screen renderer that exists: it reads its choice on import.

    Raises:
        GraphicsError: MuJoCo or a renderer is missing, or does not work.
    """
    if 'MUJOCO_GL' not in os.environ:
        for backend, library in (('osmesa', 'libOSMesa.so.8'), ('egl', 'libEGL.so.1')):
            try:
                ctypes.CDLL(library)
            except OSError:
                continue
            os.environ['MUJOCO_GL'] = backend
            break
        else:
            raise GraphicsError(
                'expected OSMesa or EGL to render without a screen, found neither '
                'libOSMesa.so.8 nor libEGL.so.1: apt install libosmesa6, or where there is no such '
                'package libegl1 libgl1-mesa-dri'
            )
    try:
        import mujoco
    except ImportError as error:
        if 'mujoco' in str(error):
            raise GraphicsError(f'MuJoCo is not installed ({error}): pip install mujoco') from error
        raise no_graphics(error) from error
    except (AttributeError, OSError, RuntimeError) as error:  # PyOpenGL without a library
        raise no_graphics(error) from error
    return mujoco


def no_graphics(error: Exception) -> GraphicsError:
    """Return the error to raise where this machine's GL library refuses."""
    return GraphicsError(
        f'MUJOCO_GL={os.environ.get("MUJOCO_GL", "")!r} does not work here ({error}): '
        f'apt install libosmesa6 and set MUJOCO_GL=osmesa, or apt install libegl1 libgl1-mesa-dri '
        f'and set MUJOCO_GL=egl'
    )


def named_colour(instruction: str) -> str:
    """Return the colour that an instruction names.

    Raises:
        ValueError: it names none of them, or several.
    """
    named = [colour for colour in COLOURS if re.search(rf'\b{colour}\b', instruction.lower())]
    if len(named) != 1:
        raise ValueError(
            f'instruction: expected exactly one of the colours {list(COLOURS)}, got {instruction!r}'
        )
    return named[0]


def cell_of(yaw: float, radius: float) -> tuple[str, str]:
    """Return (row, column) of a place on the table, for example ('far', 'left')."""
    row = 'far' if radius < (RADII_M['far'][1] + RADII_M['near'][0]) / 2 else 'near'
    edge = (YAWS_RAD['middle'][1] + YAWS_RAD['right'][0]) / 2
    column = 'middle' if abs(yaw) < edge else 'right' if yaw > 0 else 'left'
    return row, column


def random_layout(rng: np.random.Generator) -> np.ndarray:
    """Return (3, 2) yaw and radius of the red, green and blue block, in three different cells."""
    cells = [CELLS[i] for i in rng.choice(len(CELLS), len(COLOURS), replace=False)]
    return np.array([[rng.uniform(*YAWS_RAD[c]), rng.uniform(*RADII_M[r])] for r, c in cells])


def random_tip(rng: np.random.Generator) -> np.ndarray:
    """Return (3,) yaw, radius and height of a fingertip that hovers somewhere over the table."""
    return np.array([rng.uniform(-1.1, 1.1), rng.uniform(0.22, 0.41), rng.uniform(0.12, 0.2)])


def joints_to_tip(joints: np.ndarray) -> np.ndarray:
    """Return (..., 3) yaw, radius and height of the fingertip at joint positions (..., 4)."""
    joints = np.asarray(joints, np.float64)
    angles = np.cumsum(joints[..., 1:], axis=-1)  # of the three links, from the vertical
    lengths = np.array([UPPER_M, FOREARM_M, FINGER_M])
    radius = (lengths * np.sin(angles)).sum(-1)
    height = SHOULDER_M + (lengths * np.cos(angles)).sum(-1)
    return np.stack([joints[..., 0], radius, height], axis=-1)


def tip_to_joints(tip: np.ndarray) -> np.ndarray:
    """Return (..., 4) joint positions, elbow up and finger vertical, for tips (..., 3).

    Places out of reach become the nearest the arm can stretch or fold to.
    """
    yaw, radius, height = np.moveaxis(np.asarray(tip, np.float64), -1, 0)
    rise = height + FINGER_M - SHOULDER_M
    reach_sq = radius**2 + rise**2
    cosine = (reach_sq - UPPER_M**2 - FOREARM_M**2) / (2 * UPPER_M * FOREARM_M)
    elbow = np.arccos(np.clip(cosine, -1.0, 1.0))
    inner = np.arctan2(FOREARM_M * np.sin(elbow), UPPER_M + FOREARM_M * np.cos(elbow))
    shoulder = np.arctan2(radius, rise) - inner
    joints = np.stack([yaw, shoulder, elbow, np.pi - shoulder - elbow], axis=-1)
    return np.clip(joints, LOWER_RAD, UPPER_RAD)


_SCENE = """
<mujoco model="tabletop">
  <compiler angle="radian"/>
  <option timestep="{physics_s}" integrator="implicitfast"/>
  <visual>
    <quality offsamples="0"/>
    <global offwidth="960" offheight="960"/>
    <headlight ambient=".45 .45 .45" diffuse=".5 .5 .5" specular="0 0 0"/>
  </visual>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".80 .87 .93" rgb2=".93 .95 .97"
      width="64" height="64"/>
    <texture name="wood" type="2d" builtin="checker" rgb1=".80 .72 .60" rgb2=".76 .68 .56"
      width="128" height="128"/>
    <material name="wood" texture="wood" texrepeat="8 8" reflectance="0"/>
    <material name="steel" rgba=".30 .33 .38 1"/>
    <material name="brass" rgba=".95 .65 .10 1"/>
  </asset>
  <default>
    <geom contype="1" conaffinity="2" density="300"/>
    <joint armature=".05"/>
    <position kp="160" kv="8"/>
    <default class="table"><geom contype="2" conaffinity="1"/></default>
  </default>
  <worldbody>
    <light pos=".4 .5 2" dir="-.1 -.2 -1" directional="true" diffuse=".35 .35 .35"
      specular="0 0 0"/>
    <camera name="base" pos=".80 0 .80" xyaxes="0 1 0 -.777 0 .630" fovy="47"/>
    <camera name="side" pos=".25 .95 .85" xyaxes="-1 0 0 0 -.688 .725" fovy="36"/>
    <geom class="table" name="table" type="box" pos=".2 0 -.02" size=".5 .6 .02" material="wood"/>
{blocks}
    <body name="base" gravcomp="1">
      <geom type="cylinder" size=".045 .08" pos="0 0 .08" material="steel"/>
      <body name="turret" pos="0 0 {shoulder}" gravcomp="1">
        <joint name="yaw" axis="0 0 1" range="{range0}" limited="true"/>
        <geom type="cylinder" size=".042 .03" pos="0 0 -.03" material="brass"/>
        <body name="upper" gravcomp="1">
          <joint name="shoulder" axis="0 1 0" range="{range1}" limited="true"/>
          <geom type="capsule" size=".022" fromto="0 0 0 0 0 {upper}" material="steel"/>
          <body name="forearm" pos="0 0 {upper}" gravcomp="1">
            <joint name="elbow" axis="0 1 0" range="{range2}" limited="true"/>
            <geom type="sphere" size=".03" material="brass"/>
            <geom type="capsule" size=".018" fromto="0 0 0 0 0 {forearm}" material="steel"/>
            <body name="hand" pos="0 0 {forearm}" gravcomp="1">
              <joint name="wrist" axis="0 1 0" range="{range3}" limited="true"/>
              <geom type="sphere" size=".022" material="brass"/>
              <geom type="capsule" size=".009" fromto="0 0 0 0 0 {finger}" rgba=".9 .9 .9 1"/>
              <geom type="sphere" size=".011" pos="0 0 {finger}" rgba=".85 .1 .75 1"/>
              <site name="tip" pos="0 0 {finger}" size=".002"/>
            </body>
          </body>
        </body>
      </body>
    </body>
  </worldbody>
  <actuator>
{actuators}
  </actuator>
</mujoco>
"""

_RGBA = {'red': '.90 .10 .08 1', 'green': '.10 .70 .15 1', 'blue': '.08 .20 .90 1'}


def _scene() -> str:
    half = BLOCK_M / 2
    ranges = {
        f'range{i}': f'{low} {high}'
        for i, (low, high) in enumerate(zip(LOWER_RAD, UPPER_RAD, strict=True))
    }
    return _SCENE.format(
        physics_s=PHYSICS_S,
        shoulder=SHOULDER_M,
        upper=UPPER_M,
        forearm=FOREARM_M,
        finger=FINGER_M,
        blocks='\n'.join(
            f'    <body name="{colour}"><geom class="table" name="{colour}" type="box" '
            f'size="{half} {half} {half}" rgba="{rgba}"/></body>'
            for colour, rgba in _RGBA.items()
        ),
        actuators='\n'.join(
            f'    <position joint="{joint}" ctrlrange="{ranges[f"range{i}"]}"/>'
            for i, joint in enumerate(JOINTS)
        ),
        **ranges,
    )


class TabletopWorld:
    """One table. Owned by one thread, since a renderer belongs to the thread that made it."""

    CAMERAS = CAMERAS
    JOINTS = JOINTS
    CONTROL_HZ = CONTROL_HZ

    def __init__(self) -> None:
        """Build the scene, reset with seed 0.

        Raises:
            GraphicsError: MuJoCo or a software renderer is missing.
        """
        self._mujoco = import_mujoco()
        self._model = self._mujoco.MjModel.from_xml_string(_scene())
        self._data = self._mujoco.MjData(self._model)
        self._renderers: dict[int, Any] = {}
        self._block_of_geom = {self._model.geom(colour).id: colour for colour in COLOURS}
        self._tip = self._model.site('tip').id
        self._bodies = [self._model.body(colour).id for colour in COLOURS]
        self.blocks = np.zeros((len(COLOURS), 2))
        """(3, 2) yaw [rad] and radius [m] of the red, green and blue block."""
        self.reset(0)

    # --- time ---------------------------------------------------------------------------------

    def reset(self, seed: int) -> None:
        """Lay the blocks out anew and put the arm somewhere above them, both by the seed."""
        rng = np.random.default_rng(seed)
        layout = random_layout(rng)
        self.place(layout, tip_to_joints(random_tip(rng)))

    def place(self, blocks: np.ndarray, joints: np.ndarray) -> None:
        """Put blocks (3, 2) and joints (4,) exactly there, at rest; nothing counts as touched."""
        self.blocks = np.array(blocks, np.float64)
        for body, (yaw, radius) in zip(self._bodies, self.blocks, strict=True):
            position = (radius * np.cos(yaw), radius * np.sin(yaw), BLOCK_M / 2)
            self._model.body_pos[body] = position
            # A cube faces the robot, so that its look does not depend on the cell.
            self._model.body_quat[body] = (np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2))
        self._mujoco.mj_resetData(self._model, self._data)
        self._data.qpos[:] = joints
        self._data.ctrl[:] = joints
        self._mujoco.mj_forward(self._model, self._data)
        self.clear_touches()

    def step(self, targets: Sequence[float] | np.ndarray, duration_s: float = 0.1) -> None:
        """Drive the joints towards target positions (4,) [rad] for one control period.

        `duration_s` is rounded to whole physics steps of 5 ms.
        """
        self._data.ctrl[:] = np.clip(targets, LOWER_RAD, UPPER_RAD)
        for _ in range(max(1, round(duration_s / PHYSICS_S))):
            self._mujoco.mj_step(self._model, self._data)
            self._watch()

    @property
    def time_s(self) -> float:
        """Simulated time since the reset."""
        return float(self._data.time)

    def close(self) -> None:
        """Free the renderers; MuJoCo prints a traceback at exit where this is forgotten."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    # --- what the robot feels and sees --------------------------------------------------------

    def joint_positions(self) -> np.ndarray:
        """Return (4,) float64 [rad], in the order of `JOINTS`."""
        return np.array(self._data.qpos)

    def joint_velocities(self) -> np.ndarray:
        """Return (4,) float64 [rad/s]."""
        return np.array(self._data.qvel)

    def render(self, camera: str, size: int = IMAGE_SIZE) -> np.ndarray:
        """Return what a camera sees, uint8 (size, size, 3) RGB.

        Raises:
            GraphicsError: no picture can be made on this machine.
        """
        if camera not in CAMERAS:
            raise ValueError(f'camera: expected one of {list(CAMERAS)}, got {camera!r}')
        renderer = self._renderer(size)
        renderer.update_scene(self._data, camera=camera)
        return np.array(renderer.render())

    def _renderer(self, size: int) -> Any:
        if size not in self._renderers:
            try:
                renderer = self._mujoco.Renderer(self._model, size, size)
            except Exception as error:  # whatever the GL library of this machine raises
                raise no_graphics(error) from error
            # Shadows and reflections cost ten times the rest of the picture.
            renderer.scene.flags[self._mujoco.mjtRndFlag.mjRND_SHADOW] = False
            renderer.scene.flags[self._mujoco.mjtRndFlag.mjRND_REFLECTION] = False
            self._renderers[size] = renderer
        return self._renderers[size]

    # --- the truth ----------------------------------------------------------------------------

    def tip(self) -> np.ndarray:
        """Return (3,) position of the fingertip [m]."""
        return np.array(self._data.site_xpos[self._tip])

    def tops(self) -> np.ndarray:
        """Return (3, 3) centres of the upper faces of the red, green and blue block [m]."""
        yaw, radius = self.blocks.T
        height = np.full(len(COLOURS), BLOCK_M)
        return np.stack([radius * np.cos(yaw), radius * np.sin(yaw), height], axis=-1)

    def distance(self, colour: str) -> float:
        """Return how far the fingertip is from the middle of the top of a block [m]."""
        return float(self._distances()[COLOURS.index(colour)])

    def touched(self, colour: str) -> bool:
        """Whether the finger has stayed on this block for `TOUCH_S` since `clear_touches`."""
        return bool(self._longest_s[COLOURS.index(colour)] >= TOUCH_S - PHYSICS_S / 2)

    def bumped(self, colour: str) -> bool:
        """Whether any part of the arm has hit this block since `clear_touches`."""
        return colour in self._bumped

    def succeeded(self, instruction: str) -> bool:
        """Whether the named block was touched, and no other one touched or hit."""
        named = named_colour(instruction)
        others = [colour for colour in COLOURS if colour != named]
        return self.touched(named) and not any(map(self.bumped, others))

    def clear_touches(self) -> None:
        """Forget what was touched and hit: a new instruction begins."""
        self._staying_s = np.zeros(len(COLOURS))
        self._longest_s = np.zeros(len(COLOURS))
        self._bumped: set[str] = set()

    def narration(self, instruction: str) -> str:
        """Return what a perfect narrator says at this moment."""
        colour = named_colour(instruction)
        if self.distance(colour) < SAY_TOUCHING_M:
            return f'touching the {colour} block'
        row, column = cell_of(*self.blocks[COLOURS.index(colour)])
        return f'moving to the {colour} block, {row} {column}'

    def memory(self) -> str:
        """Return the note a perfect observer writes: where each block lies."""
        cells = [cell_of(*block) for block in self.blocks]
        return ', '.join(
            f'{colour} {row} {column}' for colour, (row, column) in zip(COLOURS, cells, strict=True)
        )

    def project(self, camera: str, points: np.ndarray) -> np.ndarray:
        """Return (n, 2) column and row, from 0 to 1, of points (n, 3) in a camera's picture."""
        index = self._model.camera(camera).id
        local = (points - self._data.cam_xpos[index]) @ self._data.cam_xmat[index].reshape(3, 3)
        scale = 0.5 / np.tan(np.radians(self._model.cam_fovy[index]) / 2)
        right, up, depth = local[:, 0], local[:, 1], -local[:, 2]
        return np.stack([0.5 + scale * right / depth, 0.5 - scale * up / depth], axis=-1)

    def _distances(self) -> np.ndarray:
        return np.linalg.norm(self.tops() - self._data.site_xpos[self._tip], axis=-1)

    def _watch(self) -> None:
        near = self._distances() < TOUCH_M
        self._staying_s = np.where(near, self._staying_s + PHYSICS_S, 0.0)
        self._longest_s = np.maximum(self._longest_s, self._staying_s)
        for i in range(self._data.ncon):
            for geom in self._data.contact[i].geom:
                if int(geom) in self._block_of_geom:
                    self._bumped.add(self._block_of_geom[int(geom)])
