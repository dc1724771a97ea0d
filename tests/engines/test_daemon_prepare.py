"""What is done before engines start: a JVM's flags are tried, and `daemons.build` runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fasttrain.errors import EnvSpecError
from fasttrain_engines import daemon
from fasttrain_engines.daemon import prepare
from fasttrain_engines.settings import DaemonsConfig

WRITES = "import os; open('built', 'a').write(os.environ['WHAT'])"


def test_it_builds_once_where_the_engines_run(tmp_path: Path):
    settings = DaemonsConfig(
        command=("engine",), build=(sys.executable, "-c", WRITES), cwd=str(tmp_path), env={"WHAT": 7}
    )
    prepare(settings)
    prepare(settings)
    assert (tmp_path / "built").read_text() == "7"


def test_a_build_that_fails_is_shown():
    says = "import sys; print('line 3: no such class'); sys.exit(2)"
    with pytest.raises(EnvSpecError, match=r"(?s)daemons\.build=.* exit code 2; it said:\nline 3: no such class"):
        prepare(DaemonsConfig(command=("engine",), build=(sys.executable, "-c", says)))


def test_the_package_of_a_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvSpecError, match="default-jdk-headless"):
        prepare(DaemonsConfig(command=("java", "Engine"), build=("javac", "Engine.java")))


def test_flags_that_java_refuses_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    java = tmp_path / "java"
    java.write_text('#!/bin/sh\ncase "$*" in *{*|*-XX:+New*) echo "Unrecognized VM option \'New\'"; exit 1; esac\n')
    java.chmod(0o755)
    prepare(DaemonsConfig(command=(str(java), "Engine"), jvm_flags=("-Xss1m", "-XX:Cores={threads}")))
    with pytest.raises(EnvSpecError, match=r"daemons\.jvm_flags: .*java does not start with -XX:\+New: Unrecognized"):
        prepare(DaemonsConfig(command=(str(java), "Engine"), jvm_flags=("-Xss1m", "-XX:+New")))
    monkeypatch.setattr(daemon, "refused_flags", pytest.fail)
    prepare(DaemonsConfig(command=("engine",)))
