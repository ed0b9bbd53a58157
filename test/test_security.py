"""What comes from outside is data and runs no code; the SROS 2 policy is that of the live node."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from robot import Robot

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'oxygen_ros'
MODULES = sorted(PACKAGE.rglob('*.py'))
# They build objects of any class from bytes, and building may call anything.
FORBIDDEN_IMPORTS = {'pickle', 'cPickle', 'marshal', 'shelve', 'dill', 'cloudpickle', 'joblib'}
FORBIDDEN_CALLS = {
    'eval', 'exec', 'compile', '__import__', 'os.system', 'os.popen', 'torch.load', 'torch.save',
    'yaml.full_load', 'yaml.unsafe_load', 'yaml.load_all', 'yaml.full_load_all',
}  # fmt: skip
FORBIDDEN_ARGUMENTS = {'allow_pickle', 'shell'}
"""Given by any caller, whatever the value: the defaults are the safe ones."""


def findings(source: str) -> Iterator[str]:
    """Everything in a module that could run what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {alias.name.partition('.')[0] for alias in node.names}
            yield from names & FORBIDDEN_IMPORTS
        elif isinstance(node, ast.ImportFrom):
            yield from {(node.module or '').partition('.')[0]} & FORBIDDEN_IMPORTS
        elif isinstance(node, ast.Call):
            yield from dangers_of(node)


def dangers_of(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    if name in FORBIDDEN_CALLS:
        yield name
    if name == 'yaml.load' and ast.unparse(call.args[1]) != '_StrictLoader':
        yield 'yaml.load'
    yield from {keyword.arg or '' for keyword in call.keywords} & FORBIDDEN_ARGUMENTS


@pytest.mark.parametrize('path', MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_module_runs_what_it_reads(path: Path) -> None:
    assert not list(findings(path.read_text(encoding='utf-8')))


@pytest.mark.parametrize(
    'source',
    [
        'import pickle', 'from pickle import loads', 'def f():\n    import marshal.x',
        'eval("1")', 'torch.load(p, weights_only=True)', 'yaml.load(t, yaml.Loader)',
        'np.load(p, allow_pickle=True)', 'subprocess.run(c, shell=True)',
    ],
)  # fmt: skip
def test_what_could_run_code_is_found(source: str) -> None:
    assert list(findings(source))


def test_the_strict_yaml_loader_is_a_safe_one() -> None:
    yaml = pytest.importorskip('yaml')
    from oxygen_ros import profile

    assert issubclass(profile._StrictLoader, yaml.SafeLoader)


# --- SROS 2 --------------------------------------------------------------------------------

POLICY = ElementTree.parse(ROOT / 'config' / 'sros2_policy.xml')
# What stands in the policy for a node with other parameters than the one of the test.
OPTIONAL = {
    'subscribe': {'/clock'},
    'publish': {'/oxygen/would_be_command'},
    'reply': {'/oxygen/get_type_description'},  # Humble has none
}


def allowed(enclave: str, right: str) -> set[str]:
    return {
        name.text or ''
        for block in POLICY.iterfind(f'.//enclave[@path="{enclave}"]/profiles/profile/*')
        if block.get(right) == 'ALLOW'
        for name in block
    }


def test_the_policy_allows_what_the_node_uses_and_nothing_else(graph, tmp_path: Path) -> None:
    robot = Robot(graph, tmp_path)
    try:
        robot.start(memory_path=tmp_path / 'notes.db')
        robot.run_until_active()
        node = graph.node
        used = {
            'subscribe': node.get_subscriber_names_and_types_by_node('oxygen', '/'),
            'publish': node.get_publisher_names_and_types_by_node('oxygen', '/'),
            'reply': node.get_service_names_and_types_by_node('oxygen', '/'),
        }
    finally:
        robot.close()
    for right, names_and_types in used.items():
        names = {name for name, _ in names_and_types}
        assert names, right
        assert names <= allowed('/oxygen', right)
        assert allowed('/oxygen', right) - names <= OPTIONAL[right]


def test_an_operator_is_heard_and_reaches_only_what_the_node_has() -> None:
    assert allowed('/operator', 'subscribe') <= allowed('/oxygen', 'publish')
    assert allowed('/operator', 'request') <= allowed('/oxygen', 'reply')
    assert '/instruction' in allowed('/operator', 'publish') & allowed('/oxygen', 'subscribe')
    assert not allowed('/operator', 'publish') & {'/joint_command', '/joint_states'}


def test_no_name_of_the_policy_is_a_pattern() -> None:
    names = [element.text or '' for element in POLICY.iter() if element.tag in ('topic', 'service')]
    assert names
    assert not [name for name in names if set('*?[~') & set(name) or not name.startswith('/')]
