"""Reinforcement learning in a training loop of your own: claims, token logs, published weights.

Names are loaded when first used, so that environments may import theirs without torch.
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from holdfast.adapters.rl.engines.announced import AnnouncedServers
    from holdfast.adapters.rl.engines.completions import CompletionServer
    from holdfast.adapters.rl.engines.keeping import keep_server
    from holdfast.adapters.rl.engines.pool import EnginePool
    from holdfast.adapters.rl.engines.protocol import SampledToken, SamplingEngine, TokenPlace
    from holdfast.adapters.rl.engines.sampling import sample_for
    from holdfast.adapters.rl.engines.vllm import VLLMServer
    from holdfast.adapters.rl.engines.weight_folder import WeightFolder
    from holdfast.adapters.rl.environments.base import Action, Observation, ToolError
    from holdfast.adapters.rl.library import (
        BatchPlan,
        Borrowed,
        Episode,
        Mode,
        Rollouts,
        Sample,
        Share,
        Trajectory,
        TurnLimits,
    )
    from holdfast.adapters.rl.sampler_process import attach

    __all__ = [
        "Action",
        "AnnouncedServers",
        "BatchPlan",
        "Borrowed",
        "CompletionServer",
        "EnginePool",
        "Episode",
        "Mode",
        "Observation",
        "Rollouts",
        "Sample",
        "SampledToken",
        "SamplingEngine",
        "Share",
        "TokenPlace",
        "ToolError",
        "Trajectory",
        "TurnLimits",
        "VLLMServer",
        "WeightFolder",
        "attach",
        "keep_server",
        "sample_for",
    ]
else:
    __getattr__, __dir__, __all__ = lazy_loader.attach(
        "holdfast.adapters.rl",
        submod_attrs={
            "engines.announced": ["AnnouncedServers"],
            "engines.completions": ["CompletionServer"],
            "engines.keeping": ["keep_server"],
            "engines.pool": ["EnginePool"],
            "engines.protocol": ["SampledToken", "SamplingEngine", "TokenPlace"],
            "engines.sampling": ["sample_for"],
            "engines.vllm": ["VLLMServer"],
            "engines.weight_folder": ["WeightFolder"],
            "environments.base": ["Action", "Observation", "ToolError"],
            "library": [
                "BatchPlan",
                "Borrowed",
                "Episode",
                "Mode",
                "Rollouts",
                "Sample",
                "Share",
                "Trajectory",
                "TurnLimits",
            ],
            "sampler_process": ["attach"],
        },
    )
