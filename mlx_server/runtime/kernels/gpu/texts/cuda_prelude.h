// Gives CUDA the words of the Metal kernels, so that one text serves both. Goes into a kernel's header.
#define threadgroup_position_in_grid blockIdx
#define thread_position_in_grid \
  make_uint3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z)
#define paged_thread_index (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
#define thread_index_in_simdgroup (paged_thread_index & 31)
#define simdgroup_index_in_threadgroup (paged_thread_index >> 5)
#define threadgroup_barrier(flags) __syncthreads()
typedef unsigned short ushort;
template <class T, int N>
struct alignas(sizeof(T) * N) vec {
  T element[N];
  __device__ __forceinline__ const T& operator[](int i) const { return element[i]; }
  __device__ __forceinline__ T& operator[](int i) { return element[i]; }
};
__device__ __forceinline__ float simd_shuffle_xor(float x, ushort mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
__device__ __forceinline__ float simd_sum(float x) {
  for (int hop = 16; hop > 0; hop /= 2) {
    x += simd_shuffle_xor(x, hop);
  }
  return x;
}
namespace fast {
__device__ __forceinline__ float exp2(float x) { return exp2f(x); }
}
// Last: __device__ itself expands to an attribute of that name.
#define device
#define constant
#define threadgroup __shared__
