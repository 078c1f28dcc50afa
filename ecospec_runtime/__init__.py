"""EcoSpec runtime: a bundle in, tokens out. Imports nothing of the training side.

from ecospec_runtime import Engine
for token in Engine.from_bundle("bundle").generate("def fibonacci(n):"): print(token.text, end="")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecospec_runtime.bundle import Bundle, load_bundle
    from ecospec_runtime.config import GenerationConfig
    from ecospec_runtime.engine import Engine
    from ecospec_runtime.errors import UserError

__version__ = "0.1.0"
__all__ = ["Bundle", "Engine", "GenerationConfig", "UserError", "__version__", "load_bundle"]

_HOMES = {
    "Bundle": "bundle",
    "load_bundle": "bundle",
    "Engine": "engine",
    "GenerationConfig": "config",
    "UserError": "errors",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `--help` and light users do not pay for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ecospec_runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"ecospec_runtime.{_HOMES[name]}"), name)
