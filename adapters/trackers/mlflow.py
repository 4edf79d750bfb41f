"""MLflow as a tracker."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any, Final

from holdfast.adapters.trackers.needed import needed

_STEP: Final = "holdfast.last_step"


class MLflow:
    """Logs each metric of a step to a run of MLflow; needs the extra ``mlflow``.

    The run is found again by its name, so that a job that goes on continues it.
    """

    def __init__(self, uri: str | Path, *, run: str, experiment: str = "Default") -> None:
        """``uri`` is a tracking server's or a database's, or a directory for one (SQLite).

        ``run`` is the name of the run in ``experiment``, which is made if need be. A directory must
        be one to which every node can write.
        """
        self._place = str(uri) if "://" in str(uri) else Path(uri).absolute() / "mlflow.db"
        self._run, self._experiment = run, experiment
        self._client: Any = None
        self._id = ""

    def begin(self) -> int:
        """Find or create the run; return the last step that it has, -1 for none."""
        needed("mlflow", tracker="MLflow", extra="mlflow")
        tracking = needed("mlflow.tracking", tracker="MLflow", extra="mlflow")
        make = tracking.MlflowClient
        place = self._place if isinstance(self._place, str) else _database(self._place, make)
        self._client = client = make(tracking_uri=place)
        found = client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else client.create_experiment(self._experiment)
        runs = client.search_runs([experiment], f"attributes.run_name = '{self._run}'")
        if not runs:
            self._id = client.create_run(experiment, run_name=self._run).info.run_id
            return -1
        self._id = runs[0].info.run_id
        client.update_run(self._id, status="RUNNING")
        return int(runs[0].data.metrics.get(_STEP, -1))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Log the step's metrics; they are stored when this returns."""
        entities = needed("mlflow.entities", tracker="MLflow", extra="mlflow")
        now_ms = int(time.time() * 1000)
        values = {**metrics, _STEP: float(step)}  # one request, which is stored whole or not
        self._client.log_batch(
            self._id, metrics=[entities.Metric(k, v, now_ms, step) for k, v in values.items()]
        )

    def close(self) -> None:
        """Mark the run as finished; one that is begun again is running again."""
        self._client.set_terminated(self._id)


def _database(path: Path, client: Any) -> str:
    """Return the address of an SQLite file, which is made whole or not at all."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        client(tracking_uri=f"sqlite:///{new}").search_experiments()
        new.rename(path)
    return f"sqlite:///{path}"
