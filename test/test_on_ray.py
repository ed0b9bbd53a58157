"""oxygen_eval on a local Ray: the same results, and nothing lost with a worker."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip('rosbags')
pytest.importorskip('torch')

from test_offline import profile, results, run  # noqa: F401  (a fixture)

from oxygen_ros.evaluation import offline
from oxygen_ros.evaluation.eval_report import HTML_FILE

NUM_BAGS = 4


@pytest.fixture
def wanted(bags: Path, tmp_path: Path) -> list[Path]:
    """Four recordings that can be evaluated, and one that cannot."""
    made = [tmp_path / f'bag_{number}' for number in range(NUM_BAGS)]
    for path in made:
        shutil.copytree(bags / 'derived_camera_joint', path)
    return [*made, bags / 'rosbag2_talker_mcap']


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local Ray of two processes, whatever the machine has."""
    ray = pytest.importorskip('ray', reason='ray is not installed: pip install ray')
    start = ray.init
    monkeypatch.setattr(ray, 'init', lambda **options: start(num_cpus=2, **options))


class Assassin(threading.Thread):
    """Kills the first worker that is seen at work."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.victim = 0
        self.over = threading.Event()

    def run(self) -> None:
        import psutil

        while not self.over.wait(0.02):
            for process in psutil.Process().children(recursive=True):
                if self._works(process):
                    self.victim = process.pid
                    os.kill(process.pid, signal.SIGKILL)
                    return

    def _works(self, process: Any) -> bool:
        import psutil

        try:
            return 'ray::_evaluate_away' in ' '.join(process.cmdline())
        except psutil.Error:  # ended meanwhile
            return False


@pytest.mark.slow
def test_on_ray_the_results_are_the_same_though_a_worker_is_killed(
    two_workers: None,
    profile: Path,  # noqa: F811
    bags: Path,
    wanted: list[Path],
    tmp_path: Path,
) -> None:
    pytest.importorskip('psutil')
    assert run(tmp_path / 'here', profile, [bags / 'derived_camera_joint']) == 0
    assassin = Assassin()
    assassin.start()
    assert run(tmp_path / 'there', profile, wanted, '--ray') == 1
    assassin.over.set()
    assassin.join()
    assert assassin.victim
    expected = results(tmp_path / 'here')['derived_camera_joint'].summary
    found = results(tmp_path / 'there')
    assert len(found) == NUM_BAGS + 1
    for number in range(NUM_BAGS):
        one = found[f'bag_{number}']
        assert one.summary['digest'] == expected['digest']
        assert one.summary['drops'] == expected['drops']
        assert (tmp_path / 'there' / 'bags' / one.name / 'output_bag' / 'metadata.yaml').is_file()
    assert 'recorded as Image or CompressedImage: none' in found['rosbag2_talker_mcap'].failed
    assert (tmp_path / 'there' / HTML_FILE).is_file()


@pytest.mark.slow
def test_what_no_worker_can_load_ends_the_run_in_one_line(
    two_workers: None,
    profile: Path,  # noqa: F811
    wanted: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ('--checkpoint', str(tmp_path / 'nothing'), '--ray')
    assert run(tmp_path / 'out', profile, wanted[:1], *options) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if 'oxygen_eval:' in line]
    assert len(said) == 1
    assert 'tokenizer: expected one of' in said[0]


def test_without_ray_the_option_says_what_to_install(
    profile: Path,  # noqa: F811
    wanted: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, 'ray', None)
    assert run(tmp_path / 'out', profile, wanted, '--ray') == 2
    assert 'pip install ray' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        (['--ray', '--rate', 'recorded'], 'measures this machine'),
        (['--ray', 'last_weeks_bag'], "expected an address or nothing behind it, got 'last_weeks"),
    ],
)
def test_what_ray_cannot_do_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        offline._parse(['bag', '--profile', 'dummy', *options])
    assert said in capsys.readouterr().err
