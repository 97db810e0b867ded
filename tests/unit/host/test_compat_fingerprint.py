"""Fingerprints change with code and with nothing else, whatever version of Python takes them."""

import ast

import pytest

from verl_fuse.host.start.compat.fingerprint import canonical, fingerprint

SOURCE = '''
class Engine:
    """Builds."""

    def build(self, device: str) -> str:
        backend = f"cpu:gloo,{device}:{self.name}"
        if device:
            return backend
        return None
'''

REFORMATTED = """
class Engine:
  # Why a backend is needed.
  def build(self,
            device: "str | None"):
      'Another docstring.'
      backend = (f'cpu:gloo,'
                 f'{device}:{self.name}')  # both halves

      if (device):
          return backend
      return None
"""


def of(source: str) -> str:
    return fingerprint(ast.parse(source).body)


def test_a_known_function_has_a_known_fingerprint():
    assert canonical(ast.parse("def f(a):\n    return a, None\n").body[0]) == (
        "(FunctionDef name='f' args=(arguments args=[(arg arg='a'),]) body=[(Return value=(Tuple elts=[(Name id='a'),"
        "(Constant value=None),])),])"
    )
    assert of("def f(a):\n    return a\n") == "aaae7b213e430e9b"


def test_comments_docstrings_annotations_and_formatting_do_not_count():
    assert of(SOURCE) == of(REFORMATTED)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cpu:gloo", "cpu:mpi"),
        ("{device}:", "{device!r}:"),
        ("{device}:", "{device:>3}:"),
        ("if device", "if not device"),
        ("            return backend", "            pass\n        return backend"),
        ("return None", "return"),
        ("return None", "return 'None'"),
        ("def build(self, device: str)", "async def build(self, device: str)"),
        ("def build(self, device: str)", "def build(self, device: str = '')"),
        ("    def build", "    @staticmethod\n    def build"),
        ("class Engine:", "class Engine(Base):"),
        ('    """Builds."""', "    name: str = ''"),
    ],
)
def test_every_change_of_code_counts(old, new):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    assert of(changed) != of(SOURCE)


def test_several_definitions_have_one_fingerprint():
    assert fingerprint(ast.parse("def f(): ...\ndef g(): ...\n").body) != of("def f(): ...\n")
