/* A CUDA driver without a GPU: the calls that baton/transport/cuda_ipc/driver.py makes, with their real signatures.

   Device memory is shared memory of the host, and allocations are parts of one memfd. An IPC handle names a process,
   a descriptor of it and such a part. Work on a stream is done when the stream is waited for, and not earlier, so
   that code without a wait always sees old bytes. As with the real driver,

     - calls that touch memory need a current context of the calling thread;
     - a handle that is open is opened again at the same address, and must be closed as often as it was opened;
     - a handle cannot be opened in the process that it comes from, nor after that process has died. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };
enum { ILLEGAL_ADDRESS = 700, MOST = 256, LAZY_PEER_ACCESS = 1 };

typedef int Result;
typedef uint64_t Pointer; /* CUdeviceptr */
typedef struct { char reserved[64]; } IpcHandle; /* CUipcMemHandle, passed by value */
typedef struct { char bytes[16]; } Uuid;

typedef struct Copy {
    Pointer to, from;
    size_t nbytes;
    struct Copy *next;
} Copy;
typedef struct { Copy *first, **last; } Stream;

typedef struct {
    Pointer base;
    size_t nbytes;
    int64_t offset;    /* in the device; -1: opened from a handle */
    int num_opened;    /* how often, if it is one of those */
    IpcHandle handle;  /* by which */
} Memory;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int device_memory = -1;
static int64_t num_allocated;
static Memory memories[MOST];
static int fail_copy_in; /* 0: never; n: the n-th from now */
static __thread void *context;

static Memory *memory_at(Pointer address, size_t nbytes) {
    for (int i = 0; i < MOST; i++)
        if (memories[i].nbytes && address >= memories[i].base &&
            address + nbytes <= memories[i].base + memories[i].nbytes)
            return &memories[i];
    return NULL;
}

static Memory *unused(void) {
    for (int i = 0; i < MOST; i++)
        if (!memories[i].nbytes)
            return &memories[i];
    abort();
}

static Pointer map(int descriptor, int64_t offset, size_t nbytes) {
    void *address = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, offset);
    return address == MAP_FAILED ? 0 : (Pointer)(uintptr_t)address;
}

/* --- What the real one has as well ------------------------------------------------------------------ */

Result cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }

Result cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? SUCCESS : INVALID_DEVICE;
}

Result cuDeviceGetUuid_v2(Uuid *uuid, int device) {
    memset(uuid, 0xA0 + device, sizeof *uuid);
    return SUCCESS;
}

Result cuDevicePrimaryCtxRetain(void **retained, int device) {
    static char contexts[1];
    *retained = &contexts[device];
    return SUCCESS;
}

Result cuCtxSetCurrent(void *wanted) {
    context = wanted;
    return SUCCESS;
}

Result cuMemGetAddressRange_v2(Pointer *base, size_t *nbytes, Pointer address) {
    if (!context)
        return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    Memory *memory = memory_at(address, 1);
    if (memory) {
        *base = memory->base;
        *nbytes = memory->nbytes;
    }
    pthread_mutex_unlock(&lock);
    return memory ? SUCCESS : INVALID_VALUE;
}

Result cuIpcGetMemHandle(IpcHandle *handle, Pointer address) {
    if (!context)
        return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    Memory *memory = memory_at(address, 1);
    if (memory) {
        memset(handle, 0, sizeof *handle);
        snprintf(handle->reserved, sizeof *handle, "%d %d %lld %zu", getpid(), device_memory,
                 (long long)memory->offset, memory->nbytes);
    }
    pthread_mutex_unlock(&lock);
    return memory ? SUCCESS : INVALID_VALUE;
}

Result cuIpcOpenMemHandle_v2(Pointer *address, IpcHandle handle, unsigned flags) {
    int pid, theirs;
    long long offset;
    size_t nbytes;
    char path[64];
    if (!context)
        return INVALID_CONTEXT;
    if (flags != LAZY_PEER_ACCESS)
        return INVALID_VALUE;
    if (sscanf(handle.reserved, "%d %d %lld %zu", &pid, &theirs, &offset, &nbytes) != 4)
        return INVALID_HANDLE;
    if (pid == getpid())
        return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    Memory *memory = NULL;
    for (int i = 0; i < MOST; i++)
        if (memories[i].num_opened && !memcmp(&memories[i].handle, &handle, sizeof handle))
            memory = &memories[i];
    if (!memory) {
        snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, theirs);
        int descriptor = open(path, O_RDWR);
        Pointer base = descriptor < 0 ? 0 : map(descriptor, offset, nbytes);
        if (descriptor >= 0)
            close(descriptor);
        if (base) {
            memory = unused();
            *memory = (Memory){base, nbytes, -1, 0, handle};
        }
    }
    if (memory) {
        memory->num_opened++;
        *address = memory->base;
    }
    pthread_mutex_unlock(&lock);
    return memory ? SUCCESS : INVALID_HANDLE;
}

Result cuIpcCloseMemHandle(Pointer address) {
    if (!context)
        return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    Memory *memory = memory_at(address, 1);
    int is_ours = memory && memory->num_opened && memory->base == address;
    if (is_ours && --memory->num_opened == 0) {
        munmap((void *)(uintptr_t)memory->base, memory->nbytes);
        memory->nbytes = 0;
    }
    pthread_mutex_unlock(&lock);
    return is_ours ? SUCCESS : INVALID_VALUE;
}

Result cuStreamCreate(Stream **stream, unsigned flags) {
    if (!context)
        return INVALID_CONTEXT;
    *stream = calloc(1, sizeof **stream);
    (*stream)->last = &(*stream)->first;
    return flags <= 1 ? SUCCESS : INVALID_VALUE;
}

Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t nbytes, Stream *stream) {
    if (!context)
        return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    int fails = fail_copy_in && --fail_copy_in == 0;
    int is_known = memory_at(to, nbytes) && memory_at(from, nbytes);
    if (is_known && !fails) {
        Copy *copy = malloc(sizeof *copy);
        *copy = (Copy){to, from, nbytes, NULL};
        *stream->last = copy;
        stream->last = &copy->next;
    }
    pthread_mutex_unlock(&lock);
    return fails ? ILLEGAL_ADDRESS : is_known ? SUCCESS : INVALID_VALUE;
}

Result cuStreamSynchronize(Stream *stream) {
    if (!context)
        return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    Copy *copy = stream->first;
    stream->first = NULL;
    stream->last = &stream->first;
    for (Copy *next; copy; copy = next) {
        /* As on a device, an access to what was unmapped meanwhile is no crash of the host. */
        if (memory_at(copy->to, copy->nbytes) && memory_at(copy->from, copy->nbytes))
            memcpy((void *)(uintptr_t)copy->to, (void *)(uintptr_t)copy->from, copy->nbytes);
        next = copy->next;
        free(copy);
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

Result cuGetErrorString(int status, const char **text) {
    *text = status == INVALID_HANDLE      ? "invalid resource handle"
            : status == ILLEGAL_ADDRESS   ? "an illegal memory access"
            : status == INVALID_CONTEXT   ? "invalid device context"
                                          : "an error";
    return SUCCESS;
}

/* --- What only tests call --------------------------------------------------------------------------- */

Pointer fakeAllocate(size_t nbytes) {
    pthread_mutex_lock(&lock);
    if (device_memory < 0)
        device_memory = memfd_create("fake device memory", MFD_CLOEXEC);
    Memory *memory = unused();
    Pointer base = 0;
    if (!ftruncate(device_memory, num_allocated + (int64_t)nbytes))
        base = map(device_memory, num_allocated, nbytes);
    if (base) {
        *memory = (Memory){base, nbytes, num_allocated, 0, {{0}}};
        num_allocated += (int64_t)nbytes;
    }
    pthread_mutex_unlock(&lock);
    return base;
}

void fakeFree(Pointer base) {
    pthread_mutex_lock(&lock);
    Memory *memory = memory_at(base, 1);
    if (memory && memory->offset >= 0) {
        munmap((void *)(uintptr_t)memory->base, memory->nbytes);
        fallocate(device_memory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory->offset, (off_t)memory->nbytes);
        memory->nbytes = 0;
    }
    pthread_mutex_unlock(&lock);
}

int fakeNumOpened(void) {
    int count = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++)
        count += memories[i].nbytes ? memories[i].num_opened : 0;
    pthread_mutex_unlock(&lock);
    return count;
}

void fakeFailCopyIn(int number) {
    pthread_mutex_lock(&lock);
    fail_copy_in = number;
    pthread_mutex_unlock(&lock);
}
