/* A libcuda.so.1 for machines without a GPU: it prints every call and executes none.
 *
 * CUDA_FAKE_FAIL=cuLibraryLoadData:209 makes that call return that code. Two devices; the second
 * has compute capability 10.0. One kernel, "kernel", with three parameters.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;

static __thread uintptr_t current_context;

static CUresult outcome(const char *call) {
  const char *wanted = getenv("CUDA_FAKE_FAIL");
  size_t length = strlen(call);
  if (wanted && !strncmp(wanted, call, length) && wanted[length] == ':')
    return atoi(wanted + length + 1);
  return 0;
}

#define BEGIN(name)                     \
  CUresult code = outcome(#name);       \
  if (code) { printf(#name " fails\n"); return code; }

CUresult cuInit(unsigned flags) { BEGIN(cuInit) printf("cuInit %u\n", flags); return 0; }

CUresult cuDriverGetVersion(int *version) {
  const char *text = getenv("CUDA_FAKE_VERSION");
  *version = text ? atoi(text) : 13000;
  return 0;
}

CUresult cuDeviceGet(int *device, int ordinal) {
  if (ordinal < 0 || ordinal > 1) return 101;
  *device = ordinal;
  return 0;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
  if (attribute == 75) *value = device ? 10 : 9;
  else if (attribute == 76) *value = 0;
  else return 1;
  return 0;
}

CUresult cuDeviceGetCount(int *count) { *count = 2; return 0; }

CUresult cuDeviceGetName(char *name, int length, int device) {
  snprintf(name, (size_t)length, "Paper GPU %d", device);
  return 0;
}

CUresult cuCtxGetCurrent(uintptr_t *context) { *context = current_context; return 0; }

CUresult cuCtxGetDevice(int *device) {
  if (!current_context) return 201;
  *device = (int)(current_context - 0x1000);
  return 0;
}

CUresult cuCtxSetCurrent(uintptr_t context) {
  printf("cuCtxSetCurrent %#lx\n", (unsigned long)context);
  current_context = context;
  return 0;
}

CUresult cuDevicePrimaryCtxRetain(uintptr_t *context, int device) {
  BEGIN(cuDevicePrimaryCtxRetain)
  printf("cuDevicePrimaryCtxRetain %d\n", device);
  *context = 0x1000 + (uintptr_t)device;
  return 0;
}

CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  BEGIN(cuDevicePrimaryCtxGetState)
  *flags = 0;
  *active = device == 1;
  return 0;
}

CUresult cuLibraryLoadData(uintptr_t *library, const void *code_bytes, void *a, void *b,
                                  unsigned n, void *c, void *d, unsigned m) {
  BEGIN(cuLibraryLoadData)
  printf("cuLibraryLoadData %.4s %u %u\n", (const char *)code_bytes + 1, n, m);
  *library = 0x2000;
  return 0;
}

CUresult cuLibraryUnload(uintptr_t library) {
  BEGIN(cuLibraryUnload)
  printf("cuLibraryUnload %#lx\n", (unsigned long)library);
  return 0;
}

CUresult cuLibraryGetKernel(uintptr_t *kernel, uintptr_t library, const char *name) {
  if (strcmp(name, "kernel")) return 500;
  printf("cuLibraryGetKernel %#lx %s\n", (unsigned long)library, name);
  *kernel = 0x3000;
  return 0;
}

CUresult cuKernelGetParamInfo(uintptr_t kernel, size_t index, size_t *offset, size_t *size) {
  static const size_t offsets[] = {0, 8, 16}, sizes[] = {8, 4, 8};
  BEGIN(cuKernelGetParamInfo)
  if (kernel != 0x3000 || index > 2) return 1;
  *offset = offsets[index];
  *size = sizes[index];
  return 0;
}

CUresult cuKernelSetAttribute(int attribute, int value, uintptr_t kernel, int device) {
  BEGIN(cuKernelSetAttribute)
  printf("cuKernelSetAttribute %d %d %#lx %d\n", attribute, value, (unsigned long)kernel, device);
  return 0;
}

CUresult cuKernelGetFunction(uintptr_t *function, uintptr_t kernel) {
  if (!current_context) return 201;
  printf("cuKernelGetFunction %#lx\n", (unsigned long)kernel);
  *function = 0x4000;
  return 0;
}

CUresult cuFuncLoad(uintptr_t function) {
  printf("cuFuncLoad %#lx\n", (unsigned long)function);
  return 0;
}

typedef struct {
  int id;
  char pad[4];
  union { char bytes[64]; unsigned dim[3]; int flag; } value;
} Attribute;

typedef struct {
  unsigned grid[3], block[3], shared;
  uintptr_t stream;
  Attribute *attributes;
  unsigned count;
} Config;

CUresult cuLaunchKernelEx(const Config *c, uintptr_t function, void **params, void **extra) {
  BEGIN(cuLaunchKernelEx)
  printf("cuLaunchKernelEx %#lx grid %u %u %u block %u %u %u shared %u stream %#lx",
         (unsigned long)function, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1],
         c->block[2], c->shared, (unsigned long)c->stream);
  for (unsigned i = 0; i < c->count; i++) {
    const Attribute *a = &c->attributes[i];
    if (a->id == 4)
      printf(" cluster %u %u %u", a->value.dim[0], a->value.dim[1], a->value.dim[2]);
    else
      printf(" attribute %d = %d", a->id, a->value.flag);
  }
  printf(" params %#llx %d %#llx extra %d\n", *(unsigned long long *)params[0], *(int *)params[1],
         *(unsigned long long *)params[2], extra != NULL);
  return 0;
}

CUresult cuGetErrorName(int code, const char **name) {
  *name = code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : NULL;
  return *name ? 0 : 1;
}

CUresult cuGetErrorString(int code, const char **text) {
  *text = code == 209 ? "no kernel image is available" : NULL;
  return *text ? 0 : 1;
}

#define ENTRY(name) {#name, (void *)name}
static const struct { const char *name; void *function; } functions[] = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetAttribute),
    ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGetName),
    ENTRY(cuCtxGetCurrent), ENTRY(cuCtxGetDevice), ENTRY(cuCtxSetCurrent),
    ENTRY(cuDevicePrimaryCtxRetain), ENTRY(cuDevicePrimaryCtxGetState), ENTRY(cuLibraryLoadData), ENTRY(cuLibraryUnload),
    ENTRY(cuLibraryGetKernel), ENTRY(cuKernelGetParamInfo), ENTRY(cuKernelSetAttribute),
    ENTRY(cuKernelGetFunction), ENTRY(cuFuncLoad), ENTRY(cuLaunchKernelEx), ENTRY(cuGetErrorName),
    ENTRY(cuGetErrorString)};

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                             int *status) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (status) *status = 0;
  *function = NULL;
  if (!strcmp(name, "cuGetProcAddress") || !strcmp(name, "cuGetProcAddress_v2")) {
    *function = (void *)cuGetProcAddress_v2;
    return 0;
  }
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
    if (!strcmp(name, functions[i].name)) {
      *function = functions[i].function;
      return 0;
    }
  if (status) *status = 1;
  return 500;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
