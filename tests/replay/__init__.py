"""Predicts what a Mac would do with our steps, without one.

`record` builds steps of a model of real size with the product's own runner and Metal backend, and records the graph of
operations instead of computing it. `metal` and `encoder` apply the rules of MLX's Metal backend (MLX 0.32) to the
graph: the order of encoding, which buffers are new, shared or donated, where barriers are, when a command buffer is
committed and when the host waits. `order` checks that every use of a pool that MLX cannot see is ordered. `python -m
tests.replay` prints the figures.

The rules, by the functions of MLX that they follow:

    order of operations      transforms.cpp: eval_impl
    what a command buffer    backend/metal/eval.cpp: eval; device.cpp: needs_commit, set_input_array
      holds and when it ends
    waits of the host        transforms.cpp: eval_impl (MAX_ACTIVE_TASKS, memory limit); scheduler.h: wait_for_one
    barriers and fences      backend/metal/device.cpp: maybeInsertBarrier, end_encoding
    views, copies, donation  backend/common/{binary,unary,ternary,copy}.h, common.cpp, slicing.cpp and the eval_gpu of
                             each primitive in backend/gpu and backend/metal
    attention without a      scaled_dot_product_attention.cpp: use_fallback
      fused kernel

A command buffer is assumed to end only when the host waits for it, which gives the largest memory that a step can take;
a fast GPU releases memory earlier. Matrix products that MLX splits along K count as one dispatch, each function of
`mx.compile` as one, and equal operations on equal inputs, which MLX merges when it exports a graph, once.
"""
