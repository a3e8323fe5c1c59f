"""Operators compiled here: once a machine, by whichever process comes first, and every way there is none is told."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from profiler import compiled, doctor, user_cache

ROOT = Path(__file__).parents[2]

#: A C++ compiler takes seconds over torch's headers; this source uses one of them.
SOURCE = """
#include <torch/library.h>
TORCH_LIBRARY(NAME, library) { library.def("twice(int x) -> int", [](int64_t x) { return 2 * x; }); }
"""


def _compiler() -> list[str]:
    try:
        return compiled.compiler()
    except compiled.Uncompiled:
        return []


needs_compiler = pytest.mark.skipif(not _compiler(), reason="no C++ compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def script(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def source_in(folder: Path, name: str, text: str = "int\n") -> Path:
    path = folder / f"{name}.cpp"
    path.write_text(text)
    return path


def counting(tmp_path: Path) -> Path:
    """A compiler that is the real one, and leaves a line for each time it compiles."""
    real = compiled.compiler()
    return script(
        tmp_path / "counting",
        f"""\
        #!/bin/sh
        echo x >> {tmp_path}/times
        exec {" ".join(real)} "$@"
        """,
    )


@needs_compiler
@pytest.mark.slow
def test_processes_that_come_together_compile_once_and_each_has_the_operator(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_in(tmp_path, "twice", SOURCE.replace("NAME", "gatewise_test"))
    monkeypatch.setenv("CXX", str(counting(tmp_path)))
    code = f"""
        from pathlib import Path
        from profiler import compiled
        compiled.load(Path({str(source)!r}))
        import torch
        print(torch.ops.gatewise_test.twice(21))
    """
    each = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(3)
    ]
    for process in each:
        out, errors = process.communicate(timeout=300)
        assert (process.returncode, out) == (0, b"42\n"), errors
    assert (tmp_path / "times").read_text() == "x\n"
    (folder,) = (cache / "operators").glob("twice-*")
    assert (folder / "twice.so").stat().st_size > 0


@needs_compiler
@pytest.mark.slow
def test_what_was_compiled_once_needs_no_compiler_and_no_place_to_write(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_in(tmp_path, "thrice", SOURCE.replace("NAME", "gatewise_test_again"))
    compiled.load(source)

    def unwritable(*given: object, **more: object) -> Path:
        raise AssertionError("built again")

    monkeypatch.setattr(user_cache, "_locked", unwritable)
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    compiled.load(source)


def test_without_a_compiler_it_says_so(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    source = source_in(tmp_path, "any")
    with pytest.raises(compiled.Uncompiled, match=r"^there is no C\+\+ compiler \(g\+\+ or c\+\+\)$"):
        compiled.load(source)
    check = doctor.compiler()
    assert (check.status, check.remedy) == ("warn", "install g++, or name another compiler in CXX")
    assert check.detail.startswith("there is no C++ compiler (g++ or c++): ")


def test_the_compiler_named_is_taken_with_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = script(tmp_path / "mine", "#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("CXX", f"{mine} -q --two")
    assert compiled.compiler() == [str(mine), "-q", "--two"]
    assert doctor.compiler().detail == f"{mine} -q --two"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("/absent/g++ -q", r"^\$CXX \(/absent/g\+\+ -q\) is not there$"),
        ('g++ "', "is no command: No closing quotation$"),
    ],
)
def test_a_compiler_that_is_named_wrong_is_told(named: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", named)
    with pytest.raises(compiled.Uncompiled, match=said):
        compiled.compiler()
    assert doctor.compiler().status == "warn"


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (
            """echo "bad.cpp: note: add -Werror to make an error of it"; printf 'caf\\351\\n'
            echo "bad.cpp:1:4: error: expected a name"; exit 1""",
            r"refused it: bad\.cpp:1:4: error: expected a name$",
        ),
        ("exit 3", r"refused it: exit code 3$"),
        ("echo no room; exit 1", r"refused it: no room$"),
        ("exit 0", r"made nothing of it$"),
    ],
)
def test_a_compiler_that_refuses_is_quoted_and_nothing_is_kept(
    does: str, said: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_in(tmp_path, "bad")
    monkeypatch.setenv("CXX", str(script(tmp_path / "refuses", f"#!/bin/sh\nexec >&2\n{does}\n")))
    with pytest.raises(compiled.Uncompiled, match=said):
        compiled.load(source)
    assert [path.name for path in (cache / "operators").iterdir() if path.is_dir()] == []


def test_what_torch_cannot_load_is_no_crash(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_in(tmp_path, "odd")
    makes_rubbish = script(
        tmp_path / "rubbish",
        """\
        #!/bin/sh
        while [ $# -gt 1 ]; do if [ "$1" = -o ]; then echo rubbish > "$2"; fi; shift; done
        """,
    )
    monkeypatch.setenv("CXX", str(makes_rubbish))
    with pytest.raises(compiled.Uncompiled, match=r"odd\.so.*(too short|invalid ELF header)"):
        compiled.load(source)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path / "closed"))
    monkeypatch.setenv("CXX", str(script(tmp_path / "any", "#!/bin/sh\n")))
    with pytest.raises(compiled.Uncompiled, match="GATEWISE_CACHE"):
        compiled.load(ROOT / "README.md")


def test_a_cache_that_is_a_file_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("CXX", str(script(tmp_path / "any", "#!/bin/sh\n")))
    with pytest.raises(compiled.Uncompiled, match="GATEWISE_CACHE"):
        compiled.load(ROOT / "README.md")
