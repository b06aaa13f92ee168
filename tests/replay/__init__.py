"""What a Mac would do with our steps, told without one.

`record` builds steps of a real-size model with the product's own runner and Metal backend, and keeps the graph of
operations instead of computing it. `metal` and `encoder` follow MLX's Metal backend over such a graph by its own rules
(MLX 0.32): in which order it encodes, which buffers are new, shared or handed on, where it puts barriers, when it
commits a command buffer and when the host waits. `order` asks whether every use of a pool that MLX cannot see is
ordered. `python -m tests.replay` prints the figures.

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

A command buffer is taken to end only when the host waits for it, which is the most memory that a step can take: a
GPU that keeps up lets go earlier. Dispatches of matrix products that MLX splits along K are counted as one, functions
of `mx.compile` as one each, and equal operations on equal inputs, which MLX merges when it exports a graph, once.
"""
