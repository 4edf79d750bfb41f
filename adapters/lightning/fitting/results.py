"""Lightning's results in the middle of an epoch, as plain values and tensors, and back."""

from __future__ import annotations

from typing import Any, Final

from holdfast.adapters.lightning.fitting.attributes import detached

_META: Final = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "metric_attribute",
)
_STATE: Final = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "has_reset")
_COUNT: Final = "_update_count"
_METRICS: Final = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")
_PLACE: Final = ("_current_fx", "_first_loop_iter")


def saved_results(trainer: Any) -> dict[str, Any]:
    """Return the state of what was logged in this epoch, and the metrics of callbacks."""
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    entries = []
    for item in results.values():
        if item.is_tensor:
            meta = {name: getattr(item.meta, name) for name in _META}
            meta |= {"reduce_fx": item.meta.reduce_fx.__name__}
            state = {n: detached(getattr(item, n)) for n in (*_STATE, _COUNT) if hasattr(item, n)}
            entries.append([item.meta.fx, item.meta.name, meta, state])
    return {
        "entries": entries,
        **{name: detached(dict(getattr(connector, name))) for name in _METRICS},
        **{name: getattr(connector, name) for name in _PLACE},
    }


def restore_results(trainer: Any, saved: dict[str, Any]) -> None:
    """Give the Trainer what `saved_results` returned."""
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    results.clear()
    for fx, name, meta, state in saved["entries"]:
        value = detached(state["value"])
        results.log(fx, name, value, **meta, sync_dist_fn=trainer.strategy.reduce, batch_size=1)
        item = results[f"{fx}.{name}"]
        for each, its in state.items():
            setattr(item, each, detached(its))
    for name in _METRICS:
        setattr(connector, name, dict(detached(saved[name])))
    for name in _PLACE:
        setattr(connector, name, saved[name])
