#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fakecuda.h"
#include "state.h"

static pthread_once_t opened = PTHREAD_ONCE_INIT;
static int folder = -1;
static uint64_t local_used[FAKE_GPUS_MAX]; /* without a folder; guarded by the double's mutex */

static void state_open(void)
{
    const char *path = getenv(FAKECUDA_STATE_ENVIRONMENT);
    if (path == NULL || *path == '\0')
        return;
    mkdir(path, 0777);
    folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0 || (mkdirat(folder, "memory", 0777) != 0 && errno != EEXIST)) {
        fprintf(stderr, "FAKECUDA_STATE: %s: %s\n", path, strerror(errno));
        _exit(99);
    }
}

int fake_state_folder(void)
{
    pthread_once(&opened, state_open);
    return folder;
}

bool fake_state_exists(void)
{
    return fake_state_folder() >= 0;
}

/* One process at a time counts and adds. */
static int state_lock(void)
{
    int fd = openat(folder, "lock", O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    while (fd >= 0 && flock(fd, LOCK_EX) != 0 && errno == EINTR)
        ;
    return fd;
}

/* Reads one record; false = nobody has it any more (its file is removed then) or it is being made. */
static bool record_read(int memory, const char *name, struct fake_record *ret_record)
{
    int fd = openat(memory, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool alive = flock(fd, LOCK_SH | LOCK_NB) != 0;
    char text[128] = "";
    unsigned long long size = 0;
    int pid = 0;
    ssize_t length = pread(fd, text, sizeof(text) - 1, 0);
    if (!alive)
        unlinkat(memory, name, 0);
    close(fd);
    if (!alive || length <= 0 || sscanf(text, "%u %llu %d %15s", &ret_record->gpu, &size, &pid, ret_record->kind) != 4)
        return false;
    ret_record->size = size;
    ret_record->pid = pid;
    return true;
}

static void records_each(unsigned gpu, void (*call)(const struct fake_record *, void *), void *context)
{
    int memory = openat(folder, "memory", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = memory < 0 ? NULL : fdopendir(memory);
    for (struct dirent *entry; dir != NULL && (entry = readdir(dir)) != NULL;) {
        struct fake_record record;
        if (entry->d_name[0] != '.' && record_read(memory, entry->d_name, &record) && record.gpu == gpu)
            call(&record, context);
    }
    if (dir != NULL)
        closedir(dir);
}

void fake_state_each(unsigned gpu, void (*call)(const struct fake_record *, void *), void *context)
{
    if (!fake_state_exists())
        return;
    int lock = state_lock();
    records_each(gpu, call, context);
    close(lock);
}

static void add_size(const struct fake_record *record, void *context)
{
    *(uint64_t *)context += record->size;
}

uint64_t fake_state_used(unsigned gpu)
{
    if (!fake_state_exists())
        return local_used[gpu];
    uint64_t used = 0;
    fake_state_each(gpu, add_size, &used);
    return used;
}

static int ledger_create(unsigned gpu, uint64_t size, const char *kind)
{
    char name[64];
    static unsigned serial;
    snprintf(name, sizeof(name), "memory/%d.%u", getpid(), __atomic_add_fetch(&serial, 1, __ATOMIC_RELAXED));
    int fd = openat(folder, name, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return -errno;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 ||
        dprintf(fd, "%u %llu %d %s\n", gpu, (unsigned long long)size, getpid(), kind) < 0) {
        close(fd);
        return -EIO;
    }
    return fd;
}

int fake_state_charge(unsigned gpu, uint64_t size, uint64_t limit, const char *kind, int *ret_ledger)
{
    if (!fake_state_exists()) {
        if (size > limit || local_used[gpu] > limit - size)
            return -ENOMEM;
        local_used[gpu] += size;
        *ret_ledger = -1;
        return 0;
    }
    int lock = state_lock();
    uint64_t used = 0;
    records_each(gpu, add_size, &used);
    int ledger = size > limit || used > limit - size ? -ENOMEM : ledger_create(gpu, size, kind);
    close(lock);
    if (ledger < 0)
        return ledger;
    *ret_ledger = ledger;
    return 0;
}

void fake_state_uncharge(unsigned gpu, uint64_t size)
{
    if (!fake_state_exists())
        local_used[gpu] -= size;
}

int fake_state_lost(unsigned gpu)
{
    char name[16], text[16] = "";
    if (!fake_state_exists())
        return 0;
    snprintf(name, sizeof(name), "lost%u", gpu);
    int fd = openat(folder, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, text, sizeof(text) - 1);
    close(fd);
    int error = length > 0 ? atoi(text) : 0;
    return error != 0 ? error : 719;
}

bool fake_state_held(unsigned gpu)
{
    char name[16];
    snprintf(name, sizeof(name), "hold%u", gpu);
    return fake_state_exists() && faccessat(folder, name, F_OK, 0) == 0;
}

void fake_state_lose(unsigned gpu, int error)
{
    char name[16];
    snprintf(name, sizeof(name), "lost%u", gpu);
    int fd = fake_state_exists() ? openat(folder, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666) : -1;
    if (fd >= 0) {
        dprintf(fd, "%d\n", error);
        close(fd);
    }
}

void fake_state_xid(unsigned gpu, int xid)
{
    int fd = fake_state_exists() ? openat(folder, "xid", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
    if (fd >= 0) {
        dprintf(fd, "%u %d\n", gpu, xid);
        close(fd);
    }
}
