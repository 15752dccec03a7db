"""Every block of code in README and docs runs as it stands there."""

import pathlib
import re
import shlex

import pytest

from mojolearn.cli import main

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(python|console|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "document"}
    for kind, code in blocks(page):
        if kind == "python":
            exec(compile(code, str(page), "exec"), namespace)
        elif kind == "toml":
            pathlib.Path("settings.toml").write_text(code)
            from mojolearn.cli.settings import read_config

            assert read_config("settings.toml")
        elif page.name != "README.md":  # its commands stand for a whole working day
            for line in code.splitlines():
                if line.startswith("$ mojolearn "):
                    assert main(shlex.split(line[len("$ mojolearn ") :], comments=True)) == 0


def test_the_commands_of_the_readme_are_commands():
    (make, commands) = [code for kind, code in blocks(ROOT / "README.md") if kind == "console"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in make.splitlines():
        assert line.removeprefix("$ make ") in targets
    for line in commands.splitlines():
        command = shlex.split(line, comments=True)[2]
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0


def test_links_lead_somewhere():
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
