"""The private names of torch that Holdfast uses, each with what torch keeps there.

No other module touches them: changes for a new release of torch are made here. Names that are not
needed by every process are imported when they are used. Unless its comment says otherwise,
a name means the same in torch 2.13, 2.14 and 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn

# Public as torch.distributed.Store and so on; torch's types do not export them from there.
from torch._C._distributed_c10d import PrefixStore as PrefixStore  # noqa: PLC0414
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Work
from torch._C._distributed_c10d import Store as Store  # noqa: PLC0414
from torch._C._distributed_c10d import TCPStore as TCPStore  # noqa: PLC0414
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    StorageInfo: TypeAlias = _StorageInfo

# Gradients

# Modules and the names under which ``clip_grad_norm_`` and users find the function of the norm of
# several gradients.
CLIPS_BY: Final = (torch.nn.utils.clip_grad, "_get_total_norm")
NORM_OF_ALL: Final = (torch.nn.utils, "get_total_norm")

# Tensors

# The count of in-place writes that autograd keeps of a tensor; inference tensors have none.
version_of: Final[Callable[[torch.Tensor], int]] = attrgetter("_version")

# The hooks of a tensor by number, in the order in which they run, or None: those on its gradient,
# and those of ``register_post_accumulate_grad_hook``.
tensor_hooks_of: Final[Callable[[torch.Tensor], Any]] = attrgetter("_backward_hooks")
accumulated_hooks_of: Final[Callable[[torch.Tensor], Any]] = attrgetter(
    "_post_accumulate_grad_hooks"
)

# The tensor in this process's memory; ``to_local()`` gives another object of the same memory.
local_part_of: Final[Callable[[DTensor], torch.Tensor]] = attrgetter("_local_tensor")

# The mesh, the placements and the global shape and dtype of a DTensor, as one comparable value.
dtensor_spec_of: Final[Callable[[DTensor], object]] = attrgetter("_spec")


def split_factor_of(placement: object) -> int | None:
    """Return into how many parts other axes cut a dim before this placement does.

    None where the placement is no strided shard.
    """
    # The placement of a dim that FSDP2 cuts before tensor parallelism does; not a `Shard`.
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


# Kernels over lists of tensors: private by name, and what torch's own optimizers are made of.


def copy_each(into: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copy every tensor into the one at its place."""
    torch._foreach_copy_(into, tensors)


def multiply_each(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply every tensor, in place."""
    torch._foreach_mul_(tensors, factor)


def divide_each(tensors: list[torch.Tensor], divisor: float) -> None:
    """Divide every tensor, in place."""
    torch._foreach_div_(tensors, divisor)


def add_to_each(tensors: list[torch.Tensor], summand: float) -> None:
    """Add a number to every tensor, in place."""
    torch._foreach_add_(tensors, summand)


# Optimizers and scalers


def has_scheduler(optimizer: Optimizer) -> bool:
    """Return whether a learning-rate scheduler was ever made for an optimizer."""
    # The first scheduler replaces `step` by a function with this mark.
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def scaler_records(scaler: GradScaler) -> dict[int, dict[str, Any]]:
    """Return a scaler's notes of each optimizer since its last update, by the optimizer's id.

    ``stage`` is the optimizer's `OptState`. ``found_inf_per_device`` is, by device, a tensor that
    is 1 where a gradient is not finite.
    """
    found: dict[int, dict[str, Any]] = scaler._per_optimizer_states
    return found


def is_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Return whether ``scaler.unscale_(optimizer)`` was called since the last update."""
    record = scaler_records(scaler).get(id(optimizer))
    return record is not None and record["stage"] is OptState.UNSCALED


def forget_optimizers(scaler: GradScaler) -> None:
    """Drop a scaler's notes of optimizers, as an update does, and leave the scale as it is."""
    scaler_records(scaler).clear()


# Modules

# The dicts in which a module keeps its own parameters, buffers and submodules.
module_dicts: Final[Callable[[nn.Module], tuple[Any, Any, Any]]] = attrgetter(
    "_parameters", "_buffers", "_modules"
)

# The names of the buffers that ``state_dict()`` leaves out.
transient_buffers_of: Final[Callable[[nn.Module], set[str]]] = attrgetter(
    "_non_persistent_buffers_set"
)

# The method by which a module adds its own entries to a ``state_dict()``.
SAVE_METHOD: Final = "_save_to_state_dict"

# The hooks before and after the ``state_dict()`` of a module and of an optimizer: two dicts each.
state_dict_hooks_of: Final[Callable[[nn.Module], tuple[Any, Any]]] = attrgetter(
    "_state_dict_pre_hooks", "_state_dict_hooks"
)
optimizer_state_dict_hooks_of: Final[Callable[[Optimizer], tuple[Any, Any]]] = attrgetter(
    "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"
)

# The class of all batch norms, of any number of dims and of `SyncBatchNorm`.
BatchNorm: Final = nn.modules.batchnorm._BatchNorm

# The class of all instance norms, and that of both kinds.
InstanceNorm: Final = nn.modules.instancenorm._InstanceNorm
NormBase: Final = nn.modules.batchnorm._NormBase

# The parametrization that `torch.nn.utils.parametrizations.spectral_norm` registers.
SpectralNorm: Final = nn.utils.parametrizations._SpectralNorm

# FSDP2


def forget_shards(module: nn.Module) -> None:
    """Drop FSDP2's state of a module, so that ``fully_shard`` can be applied to it again."""
    from torch.distributed._composable_state import _module_state_mapping

    # Its state by module; torch refuses a module that is in it.
    _module_state_mapping.pop(module, None)


# FSDP1

# The name under which a module that does not keep the original parameters has the flat one.
FLAT_PARAMETER: Final = "_flat_param"


def flat_handle_of(module: FullyShardedDataParallel) -> Any:
    """Return what holds the flat parameter of an FSDP1 module; None where it has none."""
    return module._handle  # the FlatParamHandle; public attributes, but a private class


def is_summoned(handle: Any) -> bool:
    """Say whether ``summon_full_params`` is under way for a flat parameter."""
    from torch.distributed.fsdp._common_utils import HandleTrainingState

    # The phase of training that FSDP1 thinks it is in.
    return bool(handle._training_state is HandleTrainingState.SUMMON_FULL_PARAMS)


def reshard_flat(module: FullyShardedDataParallel, handle: Any) -> None:
    """Free the gathered flat parameter of an FSDP1 module; nothing before its first forward."""
    from torch.distributed.fsdp._runtime_utils import _reshard

    # FSDP1 makes `_local_shard`, the part of this rank, when the module is first run.
    if hasattr(handle.flat_param, "_local_shard"):
        _reshard(module, handle, True)  # True: free the gathered parameter


def flat_rows(handle: Any) -> Iterator[tuple[str, torch.Size, Any, torch.Tensor | None]]:
    """Yield the name, shape, place and original of every parameter in a flat one.

    The place is a ``ShardParamInfo``; there is an original with ``use_orig_params`` alone.
    """
    flat = handle.flat_param
    # Parallel tuples on the flat parameter; `_params` is None unless `_use_orig_params`.
    originals = flat._params if handle._use_orig_params else [None] * len(flat._fqns)
    yield from zip(flat._fqns, flat._shapes, flat._shard_param_infos, originals, strict=True)


def shared_in_flat(handle: Any) -> Sequence[Any]:
    """Return the ``SharedParamInfo`` of the parameters that several modules share."""
    found: Sequence[Any] = handle.flat_param._shared_param_infos
    return found


# Process groups

# The operations of a backend that torch's groups call ``all_gather_single`` and
# ``reduce_scatter_single``: of one tensor with a part for every rank. Gloo has them by these names
# alone in 2.13, by both since 2.14.
ALL_GATHER_SINGLE: Final = "_allgather_base"
REDUCE_SCATTER_SINGLE: Final = "_reduce_scatter_base"


class PythonGroup(ProcessGroup):
    """A process group written in Python, with the methods that torch calls by private names."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name: Any = ""

    def _set_group_name(self, name: Any) -> None:
        """Take the name by which functional collectives find the group."""
        self._name = name
        super()._set_group_name(name)

    @property
    def group_name(self) -> Any:
        """The name torch gave this group."""
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        """Return what serves a device: the group itself, whatever the device.

        Since 2.14 ``batch_isend_irecv`` asks this of subclasses too; pipelines send by it.
        """
        return self

    def _allgather_base(self, *args: Any, **kwargs: Any) -> Work:
        return self.all_gather_single(*args, **kwargs)

    def _reduce_scatter_base(self, *args: Any, **kwargs: Any) -> Work:
        return self.reduce_scatter_single(*args, **kwargs)


def gloo_group(
    store: Store, rank: int, size: int, *, host: str, timeout: timedelta, lazy: bool = False
) -> ProcessGroupGloo:
    """Make a gloo group that listens at ``host``; blocks until all ranks came.

    A ``lazy`` one waits for none: two ranks connect when they first talk to each other, and gloo
    then asks the store, in threads of its own.
    """
    # The only options by which a host can be given; `create_device` is public.
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=lazy)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


class PythonStore(Store):
    """A store written in Python, with the methods that torch calls by private names.

    torch's groups call the methods only as long as Python itself refers to the object.
    """

    def delete_key(self, key: str) -> bool:
        """Delete a key; subclasses say how."""
        raise NotImplementedError

    def deleteKey(self, key: str) -> bool:
        """Delete a key: torch looks for the name that it has in C++."""
        return self.delete_key(key)


# The time that a store waits for a key; public, but not in the stubs.
timeout_of: Final[Callable[[Store], timedelta]] = attrgetter("timeout")


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set how long a collective may take in the options of a backend."""
    options._timeout = timeout  # `Backend.Options` has no public name for it


def is_registered(backend: str) -> bool:
    """Say whether a backend of that name was registered."""
    # The makers of the registered backends, by names in capitals.
    return backend.upper() in dist.Backend._plugins


def restart_group_names() -> None:
    """Begin anew to number the groups, which are told apart by number."""
    # The count that names are made of; the last `destroy_process_group` sets it back as well.
    dist.distributed_c10d._world.group_count = 0


def drop_sharding_cache() -> None:
    """Forget the shardings that DTensor found for operations: they hold their mesh."""
    torch._C._clear_DTensor_sharding_propagator_cache()


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh with one axis, called ``name``, in place of all."""
    return mesh._flatten(name)  # public functions make no axis out of several


def concatenated(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return a mesh with the axes of several that were cut from the same one."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(meshes)


def keep_random_states(mesh: DeviceMesh) -> None:
    """Let random operations on DTensors of CUDA devices draw from each rank's own seed.

    Otherwise torch broadcasts rank 0's state over all ranks at the first such operation, which may
    be in a microbatch.
    """
    from torch.distributed.tensor import _random

    if _random._rng_tracker is None:
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def fake_store() -> Store:
    """Return a store for groups of the backend "fake", whose collectives do nothing.

    Registers the backend.
    """
    from torch.testing._internal.distributed import fake_pg

    return cast(Store, fake_pg.FakeStore())


# Pipelines


def stages_of(schedule: Any) -> Sequence[object]:
    """Return the stages that a pipeline schedule runs at this rank."""
    # `PipelineScheduleMulti` has `_stages`, `PipelineScheduleSingle` has `_stage`.
    found: Sequence[object] = getattr(schedule, "_stages", None) or [schedule._stage]
    return found


def microbatches_of(schedule: Any) -> int:
    """Return the ``n_microbatches`` that a pipeline schedule was made for."""
    return int(schedule._n_microbatches)


# Data


@contextmanager
def as_data_worker(*, worker: int, workers: int, seed: int, dataset: Any) -> Iterator[None]:
    """Let ``get_worker_info`` say that this process is a worker of ``dataset``."""
    from torch.utils.data._utils import worker as torch_worker

    before = torch_worker._worker_info  # what ``get_worker_info`` returns
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker, num_workers=workers, seed=seed, dataset=dataset
    )
    try:
        yield
    finally:
        torch_worker._worker_info = before


def pinned(batch: Any) -> Any:
    """Return a batch with its tensors in pinned memory, as a DataLoader does."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)  # type: ignore[no-untyped-call]


def unwatch_workers(iterator: Any) -> None:
    """Stop torch from ending this process by a signal when a worker of a DataLoader dies."""
    # Set once the iterator has told torch's SIGCHLD handler which processes to look at.
    if getattr(iterator, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


@contextmanager
def watched_loaders(
    *, begun: Callable[[Any], None], advanced: Callable[[Any], None]
) -> Iterator[None]:
    """Call ``begun`` and ``advanced`` with the iterator of a DataLoader, in the body.

    ``begun`` is called after it is made, and after it begins anew with persistent workers;
    ``advanced`` before it gives a batch. torchdata's loaders are included.
    """
    from torch.utils.data.dataloader import _BaseDataLoaderIter as Base

    make, reset, advance = Base.__init__, Base._reset, Base.__next__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        begun(self)

    def begin_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        reset(self, *args, **kwargs)
        begun(self)

    def next_of(self: Any) -> Any:
        advanced(self)
        return advance(self)

    Base.__init__, Base._reset, Base.__next__ = init, begin_anew, next_of  # type: ignore[method-assign]
    try:
        yield
    finally:
        Base.__init__, Base._reset, Base.__next__ = make, reset, advance  # type: ignore[method-assign]


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of lists, tuples, dicts and the like with ``function`` of every leaf."""
    from torch.utils import _pytree

    return _pytree.tree_map(function, tree)


# torch.distributed.checkpoint


def storage_info_class() -> type[StorageInfo]:
    """Return the class that tells in which file an item lies, and where in it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def storage_prefix(prefix: str) -> Any:
    """Return what tells torch's writer how the names of its files begin."""
    from torch.distributed.checkpoint.filesystem import _StoragePrefix

    return _StoragePrefix(prefix)


def memory_format(number: int) -> Any:
    """Return the memory format that stands as a number in a ``.metadata`` file."""
    from torch.distributed.checkpoint import metadata

    return metadata._MEM_FORMAT_ENCODING(number)


MEMORY_FORMAT: Final = "_MEM_FORMAT_ENCODING"
"""The class of memory formats, by the name that stands in ``.metadata`` files."""


def part_of_file(file: IO[bytes], *, offset: int, length: int) -> IO[bytes]:
    """Return a range of a file as a file, as DCP's own reader opens an item."""
    from torch.distributed.checkpoint.utils import _create_file_view

    return cast(IO[bytes], _create_file_view(cast(Any, file), offset, length))


def without_data() -> AbstractContextManager[Any]:
    """Return a context in which tensors have shapes, dtypes and strides, and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def offset_in_file(tensor: torch.Tensor) -> int:
    """Return where the bytes lie of a tensor that ``torch.load`` read `without_data`."""
    found: Any = tensor.untyped_storage()._checkpoint_offset  # set by ``torch.load`` alone
    return int(found)
