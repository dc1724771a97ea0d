"""Flags for Java engines, against a launcher that is a script, and the real one where it is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from fasttrain_engines.jvm import is_java, refused_flags, with_flags


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Refuses -XX:No and -XX:A together with -XX:B."""
    script = tmp_path / "java"
    script.write_text(
        '#!/bin/sh\ncase "$*" in\n *-XX:No*) echo "Unrecognized VM option No"; exit 1;;\n'
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


def test_flags_come_before_the_commands_own():
    assert with_flags(["java", "-Xmx1g", "Engine"], ["-Xss512k"]) == ["java", "-Xss512k", "-Xmx1g", "Engine"]
    assert [is_java([word]) for word in ("java", "/opt/jdk/bin/java", "javac", "node")] == [True, True, False, False]
    assert not is_java([])


@pytest.mark.skipif(shutil.which("java") is None, reason="there is no java")
def test_the_real_one_takes_the_small_flags():
    preset = Path(__file__).resolve().parents[2] / "src" / "fasttrain_engines" / "conf" / "daemons" / "small_jvm.yaml"
    small = yaml.safe_load(preset.read_text(encoding="utf-8"))["jvm_flags"]
    assert refused_flags("java", [flag.replace("{threads}", "1") for flag in small]) == {}
