import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from profiler import user_cache
from profiler.errors import InputError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_two_files(folder: Path) -> None:
    (folder / "weights").write_bytes(b"0123456789")
    (folder / "inner").mkdir()
    (folder / "inner" / "config").write_text("{}")


def built(identity="a") -> Path:
    return user_cache.build("m", identity, write_two_files, 0)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_own_variable_wins_over_xdg_and_xdg_over_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("HOME", "/h")
    assert user_cache.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("GATEWISE_CACHE")
    assert user_cache.cache_dir() == Path("/x/gatewise")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert user_cache.cache_dir() == Path("/h/.cache/gatewise")
    monkeypatch.setenv("GATEWISE_CACHE", "~/mine")
    assert user_cache.cache_dir() == Path("/h/mine")


def test_a_home_directory_of_nobody_is_a_sentence(monkeypatch):
    monkeypatch.setenv("GATEWISE_CACHE", "~nobody-of-this-name/x")
    with pytest.raises(InputError, match=r"^GATEWISE_CACHE \(~nobody-of.*/x\) is in the home directory of nobody$"):
        user_cache.cache_dir()


def test_marker_lists_sizes_and_digests_of_every_file():
    folder = built()
    assert json.loads((folder / "complete.json").read_text()) == {
        "identity": "a",
        "files": {
            "weights": {"bytes": 10, "sha256": hashlib.sha256(b"0123456789").hexdigest()},
            "inner/config": {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()},
        },
    }
    assert user_cache.fault(folder, "a", full=True) is None


def test_a_whole_entry_is_kept():
    built()

    def not_again(folder):
        raise AssertionError("built twice")

    assert user_cache.build("m", "a", not_again, 0) == user_cache.entry("m")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "weights").unlink(), "weights is missing"),
        (lambda f: (f / "weights").write_bytes(b"012"), "weights has 3 bytes, not 10"),
        (lambda f: (f / "complete.json").unlink(), "complete.json is missing or unreadable"),
        (lambda f: (f / "complete.json").write_text('{"identity": "a", "fi'), "complete.json is missing or unreadable"),
        (lambda f: (f / "complete.json").write_text("[]"), "complete.json is missing or unreadable"),
    ],
)
def test_damage_is_found_on_opening_and_mended_by_building(damage, said):
    folder = built()
    damage(folder)
    assert user_cache.fault(folder, "a") == said
    built()
    assert user_cache.fault(folder, "a", full=True) is None
    assert (folder / "weights").read_bytes() == b"0123456789"
    assert names(folder.parent) == [".m.lock", "m"]


def test_a_changed_byte_is_found_by_the_full_check_only():
    folder = built()
    (folder / "weights").write_bytes(b"0123456780")
    assert user_cache.fault(folder, "a") is None
    assert hashlib.sha256(b"0123456789").hexdigest() in str(user_cache.fault(folder, "a", full=True))
    built()
    assert (folder / "weights").read_bytes() == b"0123456789"


def test_an_entry_of_another_source_is_replaced():
    folder = built("a")
    assert user_cache.fault(folder, "b") == "it was built from another source or by another version"
    built("b")
    assert user_cache.fault(folder, "b", full=True) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InputError("no network"), RuntimeError("bug")])
def test_a_failed_build_leaves_nothing_and_keeps_what_was_there(error):
    folder = built("old")

    def fails(part):
        write_two_files(part)
        raise error

    with pytest.raises(type(error)):
        user_cache.build("m", "new", fails, 0)
    assert names(folder.parent) == [".m.lock", "m"]
    assert user_cache.fault(folder, "old", full=True) is None


def test_a_disk_that_fills_up_is_a_sentence_and_leaves_nothing(cache):
    def fills(part):
        write_two_files(part)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(InputError, match=r"m: the disk of .* became full .*about 3 MiB needed.*GATEWISE_CACHE"):
        user_cache.build("m", "a", fills, 3 * 2**20)
    assert names(cache / "models") == [".m.lock"]


def test_too_little_space_is_refused_before_building(cache):
    with pytest.raises(InputError, match=r"needs 1,048,576,000,000 MiB of disk and .* has [\d,]+ MiB free"):
        user_cache.build("m", "a", write_two_files, 1_048_576_000_000 * 2**20)
    assert names(cache / "models") == [".m.lock"]


def test_a_cache_that_cannot_be_made_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="cannot write the cache .*Not a directory.*Set GATEWISE_CACHE"):
        built()


def run_python(source: str, *, wait: bool = True) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if wait:
        process.wait(timeout=60)
    return process


def test_a_killed_build_is_cleared_away_by_the_next(cache):
    killed = run_python(
        """
        import os, signal
        from profiler import user_cache
        def builder(folder):
            (folder / "weights").write_bytes(b"0123")
            os.kill(os.getpid(), signal.SIGKILL)
        user_cache.build("m", "a", builder, 0)
        """
    )
    assert killed.returncode == -signal.SIGKILL
    killed.communicate()
    left = names(cache / "models")
    assert len(left) == 2
    assert left[1].startswith(".m.part-")
    assert user_cache.fault(user_cache.entry("m"), "a") == "it is not in the cache"
    folder = built()
    assert names(cache / "models") == [".m.lock", "m"]
    assert user_cache.fault(folder, "a", full=True) is None


def test_three_processes_at_once_build_once(cache, tmp_path):
    source = f"""
        import time
        from profiler import user_cache
        def builder(folder):
            with open({str(tmp_path / "log")!r}, "a") as log:
                log.write("built\\n")
            time.sleep(0.5)
            (folder / "weights").write_bytes(b"0123456789")
        print(user_cache.build("m", "a", builder, 0))
        """
    started = [run_python(source, wait=False) for _ in range(3)]
    printed = [process.communicate(timeout=60)[0].strip() for process in started]
    assert printed == [str(cache / "models" / "m")] * 3
    assert (tmp_path / "log").read_text() == "built\n"
    assert user_cache.fault(cache / "models" / "m", "a", full=True) is None


def test_a_thread_that_waits_says_so_and_uses_what_the_other_built():
    entered, go_on, calls, said = threading.Event(), threading.Event(), [], []

    def builder(folder):
        calls.append(folder)
        entered.set()
        assert go_on.wait(10)
        write_two_files(folder)

    def hears(sentence):
        said.append(sentence)
        go_on.set()

    first = threading.Thread(target=lambda: user_cache.build("m", "a", builder, 0))
    first.start()
    assert entered.wait(10)
    folder = user_cache.build("m", "a", builder, 0, hears)
    first.join()
    assert said == ["another process is making m; waiting for it"]
    assert len(calls) == 1
    assert user_cache.fault(folder, "a", full=True) is None


def test_files_are_as_readable_as_the_folder():
    def private(folder):
        (folder / "weights").write_bytes(b"")
        (folder / "weights").chmod(0o600)

    folder = user_cache.build("m", "a", private, 0)
    assert (folder / "weights").stat().st_mode & 0o777 == folder.stat().st_mode & 0o666
