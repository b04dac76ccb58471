"""How a model gets onto the machine: what `--model` may name, and the user's cache of converted checkpoints.

Torch-free: the command line and the front resolve models too. The one part that needs torch, the conversion of a
GGUF file's tensors, runs in a process of its own.
"""

from inferdbg.engine.core.acquire.progress import OnProgress
from inferdbg.engine.core.acquire.resolve import model_name, resolve_model

__all__ = ["OnProgress", "model_name", "resolve_model"]
