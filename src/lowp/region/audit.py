"""A dispatch mode that finds contractions which reach the dispatcher without having passed a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from lowp.compat import private
from lowp.region.engine import Engine

__all__ = ["Audit"]

_DispatchMode = cast(type, private("torch.utils._python_dispatch.TorchDispatchMode"))
_current_autograd_node = cast(Callable[[], object], private("torch._C._current_autograd_node"))

_CONTRACTIONS = frozenset(
    """
    mm bmm addmm baddbmm addbmm addmv mv addr dot vdot _addmm_activation convolution _convolution
    convolution_overrideable cudnn_convolution cudnn_convolution_transpose mkldnn_convolution conv_tbc _trilinear
    _scaled_mm _grouped_mm _int_mm _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable _native_multi_head_attention _transformer_encoder_layer_fwd
    _thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer _cudnn_rnn miopen_rnn linear
    """.split()
)


class Audit(_DispatchMode):  # type: ignore[misc, valid-type]
    """Watches the ops that an engine's region sends to the dispatcher. Costs about 20 us per op."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note a contraction that no rule has run. Ops of a backward pass are exempt: the forward pass decided them."""
        name = str(func).partition(".")[2].partition(".")[0]
        if name in _CONTRACTIONS and self.engine.active and _current_autograd_node() is None:
            running = self.engine.running
            if running is None and self.engine.is_ours(args, kwargs):
                self._miss(name)
            elif running is not None and not running[1]:
                self._miss(running[0])
        return func(*args, **(kwargs or {}))

    def _miss(self, name: str) -> None:
        path = self.engine.path.current
        self.engine.rulebook.missed(f"{name} in {path}" if path else name)
