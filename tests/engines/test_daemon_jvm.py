"""Flags for Java engines, against a launcher that is a script, and the real one where it is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from fasttrain.errors import EnvSpecError
from fasttrain_engines import daemon
from fasttrain_engines.daemon import check_jvm_flags, place_after_java, refused_flags
from fasttrain_engines.settings import DaemonsConfig


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Refuses -XX:No, -XX:A together with -XX:B, and placeholders."""
    script = tmp_path / "java"
    script.write_text(
        '#!/bin/sh\ncase "$*" in\n *-XX:No*|*{*) echo "Unrecognized VM option No"; exit 1;;\n'
        ' *-XX:A*-XX:B*) echo "Conflicting options" >&2; exit 1;;\n *-XX:Mute*) exit 3;;\nesac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return "java"


def test_each_refused_flag_is_named(java: str):
    assert refused_flags(java, ["-XX:No", "-XX:Yes"]) == {"-XX:No": "Unrecognized VM option No"}
    assert refused_flags(java, ["-XX:A", "-XX:B"]) == {"-XX:A -XX:B": "Conflicting options"}
    assert refused_flags(java, ["-XX:Mute"]) == {"-XX:Mute": "exit code 3"}
    assert refused_flags(java, ["-XX:Yes"]) == {}
    assert refused_flags("/nowhere/java", []) == {}


def test_flags_that_java_refuses_are_named(java: str, monkeypatch: pytest.MonkeyPatch):
    check_jvm_flags(DaemonsConfig(command=(java, "Engine"), jvm_flags=("-Xss1m", "-XX:Cores={threads}")))
    with pytest.raises(EnvSpecError, match=r"daemons\.jvm_flags: java does not start with -XX:No: Unrecognized VM opt"):
        check_jvm_flags(DaemonsConfig(command=(java, "Engine"), jvm_flags=("-Xss1m", "-XX:No")))
    monkeypatch.setattr(daemon, "refused_flags", pytest.fail)
    check_jvm_flags(DaemonsConfig(command=("engine",)))


def test_flags_come_behind_the_program():
    assert [place_after_java([word]) for word in ("java", "/opt/jdk/bin/java", "javac", "node")] == [1, 1, 0, 0]
    assert place_after_java(["env", "HEAP=1g", "java", "Engine"]) == 3
    assert place_after_java(["env", "JAVA=java", "node"]) == 0


@pytest.mark.skipif(shutil.which("java") is None, reason="there is no java")
def test_the_real_one_takes_the_small_flags():
    preset = Path(__file__).resolve().parents[2] / "src" / "fasttrain_engines" / "conf" / "daemons" / "small_jvm.yaml"
    small = yaml.safe_load(preset.read_text(encoding="utf-8"))["jvm_flags"]
    assert refused_flags("java", [flag.replace("{threads}", "1") for flag in small]) == {}
