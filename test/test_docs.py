"""The pages say what there is: every command of docs/ and README exists, with every option."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
EXECUTABLES = dict(
    re.findall(r'^ +(\w+)=(oxygen_ros[\w.]*):\w+$', (ROOT / 'CMakeLists.txt').read_text(), re.M)
)


def commands(start: str) -> list[str]:
    """The lines of all pages, in code blocks or between backticks, from this start on."""
    found = []
    for page in PAGES:
        found += re.findall(rf'{start} ([^`\n#]+)', page.read_text(encoding='utf-8'))
    assert found, f'no page says {start}'
    return sorted({command.strip() for command in found})


def source_of(module: str) -> str:
    return (ROOT / (module.replace('.', '/') + '.py')).read_text(encoding='utf-8')


@pytest.mark.parametrize('command', commands('ros2 run oxygen_ros'))
def test_a_program_of_the_pages_has_the_options_they_give_it(command: str) -> None:
    name, *arguments = command.split()
    assert name in EXECUTABLES
    source = source_of(EXECUTABLES[name])
    own, _, of_ros = ' '.join(arguments).partition('--ros-args')
    for option in re.findall(r'--[a-z-]+', own):
        assert f"'{option}'" in source
    parameters = source + source_of('oxygen_ros.sim.robot') + source_of('oxygen_ros.parameters')
    for parameter in re.findall(r'-p (\w+):=', of_ros):
        assert f"'{parameter}'" in parameters


@pytest.mark.parametrize('command', commands('ros2 launch oxygen_ros'))
def test_a_launch_file_of_the_pages_has_the_arguments_they_give_it(command: str) -> None:
    name, *arguments = command.split()
    source = (ROOT / 'launch' / name).read_text(encoding='utf-8')
    for argument in re.findall(r'(\w+):=', ' '.join(arguments)):
        assert f"'{argument}'" in source, argument


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_a_link_of_the_pages_leads_to_a_file(page: Path) -> None:
    links = re.findall(r'\]\((?!http)([^)#]+)\)', page.read_text(encoding='utf-8'))
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_a_key_of_a_profile_that_the_pages_name_exists(page: Path) -> None:
    template = (ROOT / 'config' / 'template.yaml').read_text(encoding='utf-8')
    named = re.findall(r'`(action|model|command)\.([a-z_]+)', page.read_text(encoding='utf-8'))
    keys = [key for section, key in named if (section, key) != ('model', 'safetensors')]
    assert not [key for key in keys if f'{key}:' not in template]
