"""Builds the sdist and the wheels into dist/, and tries each wheel: python -m scripts.release [--arm-python COMMAND].

A wheel is built for each of `PROCESSORS` and each of `PYTHONS`. The compiler is Zig's, which targets the glibc of
manylinux_2_28 and builds for both processors. auditwheel checks the symbols and libraries that a wheel needs.

Wheels for this machine's processor are installed into an empty environment of each Python in `TRIED_PYTHONS` that this
machine has, without a compiler on the PATH. COMMAND runs a Python for aarch64 that has the dependencies of triforce; it
tries the wheel for aarch64 and that Python. Without COMMAND the wheels for aarch64 are built and checked only.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
WORK = ROOT / "build" / "release"

PROCESSORS = ("x86_64", "aarch64")
GLIBC = "2.28"
PYTHONS = {"3.11": "cp311-cp311", "3.12": "cp312-abi3"}
"""Version of the Python that builds a wheel, and the tag of the wheel."""
TOOLS_PYTHON = "3.12"
TRIED_PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLDER_CPUS = {"max": "avx2", "Nehalem": "portable"}
"""CPUs that qemu 7.2 emulates for programs of x86-64, and the level of kernels that fits each."""
QEMU = "qemu-x86_64-static"
TEXT = ("generate", "It was", "-n", "8", "--temperature", "0", "-q")
"""Command whose text is the same on all processors."""
MAX_WHEEL_BYTES = 30 << 20
EXTENSION = "triforce/backends/cpu/_native"
EXTENSION_SUFFIXES = {"cp311-cp311": (".cpython-311-{}-linux-gnu.so",), "cp312-abi3": (".abi3.so",)}
AUDIT = """
import platform, sys
processor = sys.argv.pop(1)
platform.machine = lambda: processor
from auditwheel.main import main
sys.exit(main())
"""
"""auditwheel, made to believe that this machine has the processor of the wheel: it audits no others."""
NEEDED_FILES = ("triforce/assets/dracula.txt", "triforce/assets/pair/target/model.safetensors", "triforce/py.typed")


class ReleaseError(Exception):
    """A wheel that must not be published, or a missing tool."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check and try everything; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--arm-python", metavar="COMMAND", help="runs a Python for aarch64 with triforce's dependencies"
    )
    options = parser.parse_args(arguments)
    try:
        release(options.arm_python)
    except ReleaseError as error:
        print(f"release: error: {error}", file=sys.stderr)
        return 1
    return 0


def release(arm_python: str | None) -> None:
    """Build the sdist and all wheels, check and try them. Raises ReleaseError."""
    version = checked_version()
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob(f"triforce-{version}*"):
        old.unlink()
    tools = make_tools()
    sdist(tools)
    pythons = {version: make_environment(f"python-{version}", version) for version in PYTHONS}
    with ThreadPoolExecutor() as pool:  # Zig builds its C++ library for each processor on one core
        wheels = [
            wheel for built in pool.map(lambda p: list(build_wheels(p, pythons, tools)), PROCESSORS) for wheel in built
        ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        trials = [pool.submit(try_python, python, wheels) for python in TRIED_PYTHONS]
        trials += [pool.submit(try_arm_wheel, wheels, arm_python)] if arm_python else []
        for trial in trials:
            trial.result()


def build_wheels(processor: str, pythons: Mapping[str, Path], tools: Path) -> Iterator[Path]:
    """Build and check the wheels of a processor, and yield them. pythons: interpreters by version."""
    for version, python in pythons.items():
        began = perf_counter()
        wheel = audited(build_wheel(processor, version, python, tools), version, processor, tools)
        check_wheel(wheel, PYTHONS[version], processor)
        report(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", began)
        yield wheel


def report(text: str, began: float) -> None:
    print(f"{text}, {perf_counter() - began:.0f} s", flush=True)


def checked_version() -> str:
    """Return the version to release. Raises ReleaseError if CHANGELOG.md has no section for it."""
    source = (ROOT / "src/triforce/__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.*)"$', source, re.MULTILINE)
    assert match
    if f"## [{match[1]}]" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise ReleaseError(f"CHANGELOG.md has no section [{match[1]}]; write it")
    return match[1]


def find_python(version: str) -> Path | None:
    """Return the interpreter of a Python version: from the PATH, or from pyenv, which hides it; None without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = [Path(found) for found in (shutil.which(f"python{version}"),) if found]
    for candidate in [*on_path, *sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]:
        done = subprocess.run(
            [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2], sys.executable)"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        found_version, _, executable = done.stdout.strip().partition(" ")
        if found_version == version:
            return Path(executable)  # not the script of a version manager, which asks for a shell
    return None


def run(command: Sequence[str | Path], **options: object) -> str:
    """Run a command and return its output. Raises ReleaseError with the end of the output if it fails."""
    done = subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )  # type: ignore[call-overload]
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-30:])
        raise ReleaseError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{end}")
    return str(done.stdout)


def make_tools() -> Path:
    """Return the Python of an environment with the extra `release`. Raises ReleaseError without a Python for it."""
    python = make_environment("tools", TOOLS_PYTHON)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = project["optional-dependencies"]["release"]
    began = perf_counter()
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements])
    report("tools", began)
    return python


def make_environment(name: str, version: str) -> Path:
    """Return the Python of an environment, which is made if it is not there. Raises ReleaseError without its Python."""
    python = WORK / name / "bin" / "python"
    interpreter = find_python(version)
    if interpreter is None:
        raise ReleaseError(f"Python {version} is needed to build wheels; install it")
    if not python.exists():
        run([interpreter, "-m", "venv", "--clear", WORK / name])
    return python


def sdist(python: Path) -> None:
    code = f"import scikit_build_core.build as backend; backend.build_sdist({str(DIST)!r})"
    run([python, "-c", code], cwd=ROOT)


def compilers(processor: str, python: Path) -> Path:
    """Write Zig's compiler and archiver for a processor as programs into a folder, and return the folder."""
    zig = run([python, "-c", "import ziglang, pathlib; print(pathlib.Path(ziglang.__file__).with_name('zig'))"]).strip()
    folder = WORK / f"zig-{processor}"
    folder.mkdir(parents=True, exist_ok=True)
    # -O3 and -s also for CMake's trials: for other options Zig builds its C++ library again, which takes over a minute.
    target = f"-target {processor}-linux-gnu.{GLIBC} -O3 -s "
    for name, options in {"cc": target, "c++": target, "ar": "", "ranlib": ""}.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{zig}" {name} {options}"$@"\n')
        program.chmod(0o755)
    return folder


def build_wheel(processor: str, version: str, python: Path, tools: Path) -> Path:
    """Build the wheel of a processor and a Python version.

    All Pythons share the compiled kernels of a processor. They import the same copy of scikit-build-core, which else
    would empty the other's build folder.
    """
    zig = compilers(processor, tools)
    (packages,) = (tools.parents[1] / "lib").glob("python*/site-packages")
    defines = {"CMAKE_AR": zig / "ar", "CMAKE_RANLIB": zig / "ranlib"}
    environment = os.environ | {
        "CC": str(zig / "cc"),
        "CXX": str(zig / "c++"),
        "PATH": f"{tools.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(packages),
    }
    if processor != platform.machine():
        defines |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": processor}
        environment["_PYTHON_HOST_PLATFORM"] = f"linux-{processor}"
        environment["SETUPTOOLS_EXT_SUFFIX"] = f".cpython-{version.replace('.', '')}-{processor}-linux-gnu.so"
    settings = [f"--config-settings=build-dir={WORK / f'objects-{processor}'}"]
    settings += [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]
    settings += ["--config-settings=wheel.cmake=true"]
    output = WORK / f"wheels-{processor}-{version}"
    shutil.rmtree(output, ignore_errors=True)
    run([python, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation",
         "--wheel-dir", output, *settings, ROOT], env=environment)  # fmt: skip
    (wheel,) = output.glob("*.whl")
    if "none-any" in wheel.name:
        raise ReleaseError(f"the kernels for {processor} did not compile")
    return wheel


def audited(wheel: Path, version: str, processor: str, tools: Path) -> Path:
    """Return a copy of a wheel in dist/ with the manylinux tag. Raises ReleaseError if it needs later symbols."""
    label = f"manylinux_{GLIBC.replace('.', '_')}_{processor}"
    output = WORK / f"audited-{processor}-{version}"
    shutil.rmtree(output, ignore_errors=True)
    command = [tools, "-c", AUDIT, processor, "repair", "--plat", label, "--only-plat"]
    path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"
    run([*command, "--wheel-dir", output, wheel], env=os.environ | {"PATH": path})
    (repaired,) = output.glob("*.whl")
    return Path(shutil.copy(repaired, DIST))


def check_wheel(wheel: Path, tag: str, processor: str) -> None:
    """Raise ReleaseError if a wheel has the wrong tag or extension module, bundled libraries, or lacks files.

    A build that misses CMake's component for the stable ABI makes a module for one Python without a word.
    """
    platform_tag = f"manylinux_{GLIBC.replace('.', '_')}_{processor}"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        tags = re.findall(r"^Tag: (\S+)", archive.read(metadata).decode(), re.MULTILINE)
    if not wheel.stem.endswith(f"-{tag}-{platform_tag}") or tags != [f"{tag}-{platform_tag}"]:
        raise ReleaseError(f"{wheel.name}: the tags are {tags}, not {tag}-{platform_tag}")
    expected = [EXTENSION + suffix.format(processor) for suffix in EXTENSION_SUFFIXES[tag]]
    modules = [name for name in names if re.search(r"\.so(\.\d+)*$", name)]
    if modules != expected:
        raise ReleaseError(f"{wheel.name}: the compiled modules are {modules}, not {expected}")
    licenses = [name for name in names if re.search(r"\.dist-info/licenses/LICENSE$", name)]
    missing = [name for name in NEEDED_FILES if name not in names] + ([] if licenses else ["LICENSE"])
    if missing:
        raise ReleaseError(f"{wheel.name}: it lacks {', '.join(missing)}")
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        raise ReleaseError(f"{wheel.name}: {wheel.stat().st_size:,} bytes exceed {MAX_WHEEL_BYTES:,}")


def fitting_wheel(wheels: Sequence[Path], python: str, processor: str) -> Path:
    """Return the wheel that pip would take for a Python version."""
    tag = PYTHONS.get(python, PYTHONS["3.12"])
    (wheel,) = (wheel for wheel in wheels if f"-{tag}-" in wheel.name and wheel.stem.endswith(processor))
    return wheel


def try_python(version: str, wheels: Sequence[Path]) -> None:
    """Try the wheel of a Python version, where this machine has it."""
    if interpreter := find_python(version):
        try_wheel(fitting_wheel(wheels, version, platform.machine()), version, interpreter)
    else:
        print(f"Python {version} is not on this machine: its wheel is not tried")


def try_wheel(wheel: Path, version: str, interpreter: Path) -> None:
    """Install a wheel into an empty environment without a compiler, and run commands. Raises ReleaseError."""
    folder = WORK / f"empty-{version}"
    run([interpreter, "-m", "venv", "--clear", folder])
    python = folder / "bin" / "python"
    environment = os.environ | {"PATH": str(folder / "bin"), "XDG_CACHE_HOME": str(folder / "cache")}
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    packages = folder / "packages"
    began = perf_counter()
    run([*pip, "download", "--quiet", "--only-binary=:all:", "--dest", packages, wheel], env=environment, cwd=folder)
    run([*pip, "install", "--quiet", "--no-index", "--find-links", packages, wheel], env=environment, cwd=folder)
    megabytes = sum(file.stat().st_size for file in packages.iterdir()) / 1e6
    report(f"Python {version}: {megabytes:.0f} MB downloaded and installed", began)
    try_older_cpus(python, version, environment, folder)
    for command in trial_commands(str(folder / "bin" / "triforce")):
        began = perf_counter()
        run(command, env=environment, cwd=folder)
        report(f"Python {version}: {' '.join(['triforce', *command[1:]])}", began)
    began = perf_counter()
    try_server([folder / "bin" / "triforce"], version, environment, folder)
    report(f"Python {version}: triforce serve to the end of its first answer", began)
    target = folder / "target"
    run([*pip, "install", "--quiet", "--no-index", "--find-links", packages, "--target", target, wheel],
        env=environment, cwd=folder)  # fmt: skip
    command = [interpreter, "-m", "triforce", "generate", "It was", "-n", "1"]
    run(command, env=environment | {"PYTHONPATH": str(target)}, cwd=folder)


def try_older_cpus(python: Path, version: str, environment: dict[str, str], folder: Path) -> None:
    """Run kernels of CPUs that lack AVX-512 or AVX2, where qemu is installed. Raises ReleaseError for another text."""
    qemu = shutil.which(QEMU)
    if qemu is None or platform.machine() != "x86_64":
        print(f"{QEMU} is not on this machine: CPUs without AVX-512 are not tried")
        return
    level = "from triforce.backends.cpu._native import level; print(level())"
    expected = run([python, "-m", "triforce", *TEXT], env=environment, cwd=folder)
    for cpu, expected_level in OLDER_CPUS.items():
        began = perf_counter()
        emulated = [qemu, "-cpu", cpu, python]
        found = run([*emulated, "-c", level], env=environment, cwd=folder).strip()
        text = run([*emulated, "-m", "triforce", *TEXT], env=environment, cwd=folder)
        if found != expected_level or text != expected:
            raise ReleaseError(f"on the CPU {cpu} level {found} gives {text!r}, not {expected!r} of {expected_level}")
        report(f"Python {version}: kernels {found} give the same text", began)


def trial_commands(triforce: str) -> Iterator[list[str]]:
    """Yield the commands that are tried."""
    yield [triforce, "--version"]
    yield [triforce, "generate", "It was", "-n", "1"]
    yield [triforce, "demo", "--offline"]


def try_server(command: Sequence[str | Path], version: str, environment: dict[str, str], folder: Path) -> None:
    """Start a server, ask it for one token, and end it. Raises ReleaseError."""
    port = f"184{version.partition('.')[2]}"
    server = subprocess.Popen(
        [*map(str, command), "serve", "--port", port], env=environment, cwd=folder,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stderr
        lines = []
        for line in server.stderr:
            lines.append(line)
            if f":{port}" in line:
                break
        else:
            raise ReleaseError("serve ended:\n" + "".join(lines[-30:]))
        body = b'{"prompt": "It was", "max_tokens": 1}'
        address = f"http://127.0.0.1:{port}/v1/completions"
        with urlopen(Request(address, body, {"Content-Type": "application/json"}), timeout=60) as answer:
            answer.read()
    finally:
        server.terminate()
        server.wait()
    if server.returncode:
        raise ReleaseError(f"serve ended with {server.returncode} after SIGTERM")


def try_arm_wheel(wheels: Sequence[Path], arm_python: str) -> None:
    """Unpack the wheel of a Python for aarch64, and print a text that it generates. Raises ReleaseError."""
    version = run([arm_python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
    site = WORK / f"aarch64-{version}"
    shutil.rmtree(site, ignore_errors=True)
    zipfile.ZipFile(fitting_wheel(wheels, version, "aarch64")).extractall(site)
    began = perf_counter()
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    print(run([arm_python, "-m", "triforce", *TEXT], env=environment).rstrip())
    report(f"aarch64, Python {version}: the text above", began)


if __name__ == "__main__":
    sys.exit(main())
