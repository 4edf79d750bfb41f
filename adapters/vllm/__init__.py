"""The plug-in for vLLM: weights from snapshots, noise by place, and the version of every token.

vLLM finds `plugin.register` for every process and `routes.Endpoints` for its API server by entry
points; `worker.HoldfastWorker` and `noise.PlacedNoise` are given on the command line.
`holdfast.rl.VLLMServer` is the other side. Nothing here is imported without vLLM.
See docs/how-to/vllm.md.
"""
