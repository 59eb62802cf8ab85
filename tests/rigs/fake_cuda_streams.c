/* A driver library without a device, for models: a "GPU's" memory is the heap's, and a stream does its work when it is
waited for, as late as a real one may. It is as strict about what a caller must have done before: initialised it, made a
context current, allocated what is copied. `fake_*` functions are those of the tests. */
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long Address;
typedef struct Work { int kind; void *to, *from; size_t size; void (*call)(void *); struct Work *next; } Work;
typedef struct { Work *first, *last; int capturing; long added, done; } Stream;
typedef struct { Stream work; } Graph;
typedef struct { Stream *stream; long upto; } Event;
enum { COPY, CALL, WAIT };

#define MOST 256
static struct { char *at; size_t size; int pinned; } blocks[MOST];
static Stream *open_streams[MOST];
static int initialised, retained[8], failure, registered;
static _Atomic int streams, events, graphs, launches, drains;
static __thread int current = -1, below[8], depth;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int unlocked(int status) { pthread_mutex_unlock(&lock); return status; }

static int ready(void) { return !initialised ? 3 : current < 0 ? 201 : 0; }
static int inside(const void *at, size_t size, int pinned) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MOST; i++)
    if (blocks[i].at && blocks[i].pinned == pinned && (char *)at >= blocks[i].at && (char *)at + size <= blocks[i].at + blocks[i].size)
      return unlocked(1);
  return unlocked(0);
}
static int block(void **at, size_t size, int pinned) {
  int status = ready();
  if (status) return status;
  if (size > (size_t)1 << 32) return 2;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MOST; i++)
    if (!blocks[i].at) {
      blocks[i].at = *at = aligned_alloc(256, (size + 255) / 256 * 256);
      memset(*at, 0xA5, size);
      blocks[i].size = size;
      blocks[i].pinned = pinned;
      return unlocked(0);
    }
  return unlocked(2);
}
static int release(void *at, int pinned) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MOST; i++)
    if (blocks[i].at == (char *)at && at && blocks[i].pinned == pinned) {
      memset(at, 0x5A, blocks[i].size);
      free(at);
      blocks[i].at = NULL;
      return unlocked(0);
    }
  return unlocked(1);
}
static void add(Stream *stream, Work work) {
  Work *one = malloc(sizeof *one);
  *one = work;
  one->next = NULL;
  if (stream->last) stream->last->next = one; else stream->first = one;
  stream->last = one;
  stream->added++;
}
static int run_to(Stream *stream, long upto) {
  if (stream->capturing) return 900;
  while (stream->first && stream->done < upto) {
    Work *one = stream->first;
    stream->first = one->next;
    if (!stream->first) stream->last = NULL;
    stream->done++;
    if (!failure) {
      if (one->kind == COPY) memcpy(one->to, one->from, one->size);
      else if (one->kind == CALL) one->call(one->from);
      else run_to(one->from, (long)one->size);
    }
    free(one);
  }
  return failure;
}
static int run(Stream *stream) { return run_to(stream, stream->added); }

int fake_blocks(void) { int count = 0; for (int i = 0; i < MOST; i++) count += blocks[i].at != NULL; return count; }
int fake_objects(void) { return streams + events + graphs; }
int fake_launches(void) { return launches; }
int fake_registered(void) { return registered; }
int fake_drains(void) { return drains; }
void fake_fail(int status) { failure = status; }

int cuInit(unsigned flags) { initialised = !flags; return flags ? 1 : 0; }
int cuDeviceGetCount(int *count) { const char *text = getenv("FAKE_CUDA_DEVICES"); *count = text ? atoi(text) : 2; return initialised ? 0 : 3; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return ordinal < 0 || ordinal > 1 ? 101 : 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  if (device < 10) return 101;
  *value = attribute == 75 ? 8 : attribute == 76 ? (device == 10 ? 6 : 9) : -1;
  return *value < 0 ? 1 : 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { retained[device - 10] = 1; *context = (void *)(size_t)(90 + device); return 0; }
int cuCtxPushCurrent_v2(void *context) {
  int device = (int)(size_t)context - 100;
  if (device < 0 || device > 7 || !retained[device] || depth == 8) return 201;
  below[depth++] = current;
  current = device;
  return 0;
}
int cuCtxPopCurrent_v2(void **context) {
  (void)context;
  if (!depth) return 201;
  current = below[--depth];
  return 0;
}
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return ready(); }
int cuMemAlloc_v2(Address *at, size_t size) { return block((void **)at, size, 0); }
int cuMemFree_v2(Address at) { return ready() ? ready() : release((void *)at, 0); }
int cuMemHostAlloc(void **at, size_t size, unsigned flags) { (void)flags; return block(at, size, 1); }
int cuMemFreeHost(void *at) { return ready() ? ready() : release(at, 1); }
int cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
  if (ready() || flags != 1 || (size_t)at % 4096) return ready() ? ready() : 1;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MOST; i++)
    if (blocks[i].at && (char *)at < blocks[i].at + blocks[i].size && blocks[i].at < (char *)at + size)
      return unlocked(712);
  for (int i = 0; i < MOST; i++)
    if (!blocks[i].at) {
      blocks[i].at = at;
      blocks[i].size = size;
      blocks[i].pinned = 2;
      registered++;
      return unlocked(0);
    }
  return unlocked(2);
}
int cuMemHostUnregister(void *at) {
  if (ready()) return ready();
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MOST; i++)
    if (blocks[i].at == (char *)at && blocks[i].pinned == 2) {
      blocks[i].at = NULL;
      registered--;
      return unlocked(0);
    }
  return unlocked(713);
}
int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, Stream *stream) {
  if (ready() || !inside((void *)to, size, 0)) return ready() ? ready() : 1;
  add(stream, (Work){COPY, (void *)to, (void *)from, size, NULL, NULL});
  return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, Stream *stream) {
  if (ready() || !inside((void *)from, size, 0)) return ready() ? ready() : 1;
  add(stream, (Work){COPY, to, (void *)from, size, NULL, NULL});
  return 0;
}
int cuLaunchHostFunc(Stream *stream, void (*call)(void *), void *data) {
  add(stream, (Work){CALL, NULL, data, 0, call, NULL});
  return ready();
}
int cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
  if (ready() || flags != 1 || priority > 0 || priority < -5) return ready() ? ready() : 1;
  *stream = calloc(1, sizeof **stream);
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MOST; i++)
    if (!open_streams[i]) { open_streams[i] = *stream; break; }
  streams++;
  return unlocked(0);
}
int cuStreamSynchronize(Stream *stream) { return ready() ? ready() : run(stream); }
int cuStreamDestroy_v2(Stream *stream) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MOST; i++)
    if (open_streams[i] == stream) open_streams[i] = NULL;
  streams--;
  free(stream);
  return unlocked(0);
}
int cuCtxSynchronize(void) {
  int status = ready();
  for (int i = 0; !status && i < MOST; i++)
    if (open_streams[i]) status = run(open_streams[i]);
  drains++;
  return status;
}
int cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
  if (ready() || flags || !event) return ready() ? ready() : 1;
  if (!event->stream) return 0;
  if ((size_t)stream <= 2) return run_to(event->stream, event->upto);  /* a default stream: nobody waits for it here */
  add(stream, (Work){WAIT, NULL, event->stream, (size_t)event->upto, NULL, NULL});
  return 0;
}
int cuStreamBeginCapture_v2(Stream *stream, int mode) {
  if (ready() || mode != 1 || stream->first || stream->capturing) return ready() ? ready() : 1;
  stream->capturing = 1;
  return 0;
}
int cuStreamEndCapture(Stream *stream, Graph **graph) {
  if (!stream->capturing) return 1;
  *graph = calloc(1, sizeof **graph);
  (*graph)->work = *stream;
  (*graph)->work.capturing = 0;
  stream->first = stream->last = NULL;
  stream->added = stream->done;
  stream->capturing = 0;
  graphs++;
  return 0;
}
static Graph *copy_of(Graph *graph) {
  Graph *copy = calloc(1, sizeof *copy);
  for (Work *one = graph->work.first; one; one = one->next) add(&copy->work, *one);
  graphs++;
  return copy;
}
int cuGraphInstantiateWithFlags(Graph **made, Graph *graph, unsigned long long flags) {
  if (flags || !graph->work.first) return 1;
  *made = copy_of(graph);
  return 0;
}
int cuGraphLaunch(Graph *graph, Stream *stream) {
  for (Work *one = graph->work.first; one; one = one->next) add(stream, *one);
  launches++;
  return ready();
}
int cuGraphDestroy(Graph *graph) {
  while (graph->work.first) { Work *one = graph->work.first; graph->work.first = one->next; free(one); }
  free(graph);
  graphs--;
  return 0;
}
int cuGraphExecDestroy(Graph *graph) { return cuGraphDestroy(graph); }
int cuEventCreate(Event **event, unsigned flags) {
  if (ready() || flags > 3 || !(flags & 2)) return ready() ? ready() : 1;
  *event = calloc(1, sizeof **event);
  pthread_mutex_lock(&lock);
  events++;
  return unlocked(0);
}
int cuEventRecord(Event *event, Stream *stream) { event->stream = stream; event->upto = stream->added; return ready(); }
int cuEventSynchronize(Event *event) { return ready() ? ready() : event->stream ? run_to(event->stream, event->upto) : 1; }
int cuEventDestroy_v2(Event *event) { pthread_mutex_lock(&lock); free(event); events--; return unlocked(0); }
int cuGetErrorString(int status, const char **text) {
  switch (status) {
    case 1: *text = "invalid argument"; return 0;
    case 2: *text = "out of memory"; return 0;
    case 3: *text = "initialization error"; return 0;
    case 100: *text = "no CUDA-capable device is detected"; return 0;
    case 101: *text = "invalid device ordinal"; return 0;
    case 201: *text = "invalid device context"; return 0;
    case 712: *text = "part or all of the requested memory range is already mapped"; return 0;
    case 713: *text = "pointer does not correspond to a registered memory region"; return 0;
    case 700: *text = "an illegal memory access was encountered"; return 0;
    case 900: *text = "operation not permitted when stream is capturing"; return 0;
  }
  return 1;
}
