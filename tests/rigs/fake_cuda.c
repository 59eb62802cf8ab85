/* A driver library without a device: memory of a "GPU" is a file of the memory file system, whose path is its handle.

It is as strict as the real one about what a caller must have done before (initialised it, made a context current), and as
lazy: what is copied to the device is there when the context is synchronised. `FAKE_CUDA` is a directory: a file `lost` in
it makes every call that needs the device fail, a file `devices` says how many there are (2 without it), and in
`open.<process>` the library lists the handles that are open. */
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct { char bytes[64]; } Handle;
typedef unsigned long long Address;

#define MOST 64
static struct { char *at; size_t size; int count, is_own; char path[80]; int device; } open_memory[MOST];
static int initialised, retained[8];
static __thread int current = -1;
static struct { char *to, *bytes; size_t size; } staged[MOST];
static int staged_count;

static int exists(const char *name, char *content, size_t size) {
  char path[512];
  const char *directory = getenv("FAKE_CUDA");
  snprintf(path, sizeof path, "%s/%s", directory ? directory : "/nowhere", name);
  FILE *file = fopen(path, "r");
  if (!file) return 0;
  size_t count = content ? fread(content, 1, size - 1, file) : 0;
  if (content) content[count] = 0;
  fclose(file);
  return 1;
}

static void note(void) {
  char path[512];
  const char *directory = getenv("FAKE_CUDA");
  snprintf(path, sizeof path, "%s/open.%d", directory ? directory : "/nowhere", (int)getpid());
  FILE *file = fopen(path, "w");
  if (!file) return;
  for (int i = 0; i < MOST; i++)
    if (open_memory[i].count && !open_memory[i].is_own) fprintf(file, "%s %d\n", open_memory[i].path, open_memory[i].count);
  fclose(file);
}

static int ready(void) {
  if (!initialised) return 3;
  if (exists("lost", NULL, 0)) return 700;
  return current < 0 ? 201 : 0;
}

static int count_devices(void) {
  char text[16];
  return exists("devices", text, sizeof text) ? atoi(text) : 2;
}

static int found(Address address, size_t size) {
  for (int i = 0; i < MOST; i++) {
    char *at = (char *)address;
    if (open_memory[i].count && at >= open_memory[i].at && at + size <= open_memory[i].at + open_memory[i].size)
      return open_memory[i].device == current ? i : -1;
  }
  return -1;
}

int cuInit(unsigned flags) {
  if (flags) return 1;
  if (!count_devices()) return 100;
  initialised = 1;
  return 0;
}
int cuDeviceGetCount(int *count) { *count = count_devices(); return initialised ? 0 : 3; }
int cuDeviceGet(int *device, int ordinal) {
  if (ordinal < 0 || ordinal >= count_devices()) return 101;
  *device = 10 + ordinal;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  retained[device - 10] = 1;
  *context = (void *)(size_t)(100 + device - 10);
  return 0;
}
int cuCtxPushCurrent_v2(void *context) {
  int device = (int)(size_t)context - 100;
  if (device < 0 || device > 7 || !retained[device] || current >= 0) return 201;
  current = device;
  return 0;
}
int cuCtxPopCurrent_v2(void **context) { (void)context; current = -1; return 0; }
int cuCtxSynchronize(void) {
  int status = ready();
  if (status) return status;
  for (int i = 0; i < staged_count; i++) {
    memcpy(staged[i].to, staged[i].bytes, staged[i].size);
    free(staged[i].bytes);
  }
  staged_count = 0;
  return 0;
}
int cuMemAlloc_v2(Address *address, size_t size) {
  int status = ready(), i = 0;
  if (status) return status;
  while (i < MOST && open_memory[i].count) i++;
  if (i == MOST) return 2;
  strcpy(open_memory[i].path, "/dev/shm/test-XXXXXX");
  int file = mkstemp(open_memory[i].path);
  if (file < 0 || ftruncate(file, size)) return 2;
  open_memory[i].at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (open_memory[i].at == MAP_FAILED) return 2;
  open_memory[i].size = size;
  open_memory[i].count = open_memory[i].is_own = 1;
  open_memory[i].device = current;
  *address = (Address)open_memory[i].at;
  return 0;
}
int cuMemFree_v2(Address address) {
  int status = ready(), i = found(address, 0);
  if (status || i < 0) return status ? status : 1;
  munmap(open_memory[i].at, open_memory[i].size);
  open_memory[i].count = open_memory[i].is_own = 0;
  return unlink(open_memory[i].path) ? 1 : 0;
}
int cuIpcGetMemHandle(Handle *handle, Address address) {
  int status = ready(), i = found(address, 0);
  if (status || i < 0) return status ? status : 1;
  memset(handle, 0, sizeof *handle);
  strcpy(handle->bytes, open_memory[i].path);
  return 0;
}
int cuIpcOpenMemHandle_v2(Address *address, Handle handle, unsigned flags) {
  int status = ready();
  if (status) return status;
  if (flags != 1 || handle.bytes[63]) return 1;
  int free_place = -1;
  for (int i = 0; i < MOST; i++) {
    if (open_memory[i].count && !strcmp(open_memory[i].path, handle.bytes) && open_memory[i].device == current) {
      open_memory[i].count++;
      *address = (Address)open_memory[i].at;
      note();
      return 0;
    }
    if (!open_memory[i].count) free_place = i;
  }
  int file = open(handle.bytes, O_RDWR);
  if (file < 0) return 400;
  struct stat about;
  fstat(file, &about);
  char *at = mmap(NULL, about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) return 2;
  open_memory[free_place].at = at;
  open_memory[free_place].size = about.st_size;
  open_memory[free_place].count = 1;
  open_memory[free_place].device = current;
  strcpy(open_memory[free_place].path, handle.bytes);
  *address = (Address)at;
  note();
  return 0;
}
int cuIpcCloseMemHandle(Address address) {
  int status = ready();
  if (status) return status;
  int i = found(address, 0);
  if (i < 0) return 1;
  if (!--open_memory[i].count) munmap(open_memory[i].at, open_memory[i].size);
  note();
  return 0;
}
int cuMemGetAddressRange_v2(Address *base, size_t *size, Address address) {
  int status = ready(), i = found(address, 0);
  if (status || i < 0) return status ? status : 1;
  *base = (Address)open_memory[i].at;
  *size = open_memory[i].size;
  return 0;
}
int cuMemcpyDtoH_v2(void *to, Address from, size_t size) {
  int status = ready();
  if (status || found(from, size) < 0) return status ? status : 1;
  memcpy(to, (char *)from, size);
  return 0;
}
int cuMemcpyHtoD_v2(Address to, const void *from, size_t size) {
  int status = ready();
  if (status || found(to, size) < 0 || staged_count == MOST) return status ? status : 1;
  staged[staged_count].to = (char *)to;
  staged[staged_count].bytes = memcpy(malloc(size), from, size);
  staged[staged_count++].size = size;
  return 0;
}
int cuGetErrorString(int status, const char **text) {
  switch (status) {
    case 1: *text = "invalid argument"; return 0;
    case 3: *text = "initialization error"; return 0;
    case 100: *text = "no CUDA-capable device is detected"; return 0;
    case 201: *text = "invalid device context"; return 0;
    case 400: *text = "invalid resource handle"; return 0;
    case 700: *text = "an illegal memory access was encountered"; return 0;
  }
  return 1;
}
