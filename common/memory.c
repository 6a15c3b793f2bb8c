#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "clock.h"
#include "rpc.pb-c.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_EXEC
#define F_SEAL_EXEC 0x0020
#endif

#define SMALL_PAGE 4096u
#define HUGE_PAGE (2u * 1024 * 1024)
#define SEALS (F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define SEAL_WAIT_US RV_SEC

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

int rv_memfd_create(const char *label, unsigned extra_flags)
{
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | extra_flags;
    int fd = memfd_create(label, flags | MFD_NOEXEC_SEAL);

    if (fd < 0 && errno == EINVAL) /* before Linux 6.3 */
        fd = memfd_create(label, flags);
    return fd < 0 ? -errno : fd;
}

int rv_memfd_seal(int fd)
{
    uint64_t until = rv_now_us() + SEAL_WAIT_US;

    /* EBUSY is either a mapping (a bug, stays) or a page still referenced by a read that has just ended (passes). There
     * is no event to wait for, so this is the one place that polls. */
    while (fcntl(fd, F_ADD_SEALS, SEALS) < 0) {
        if (errno != EBUSY || rv_now_us() > until)
            return -errno;
        (void)usleep(1000);
    }
    return 0;
}

int rv_sealed_create(const char *label, const void *data, uint64_t size)
{
    const char *p = data;
    uint64_t done = 0;
    int r, fd = rv_memfd_create(label, 0);

    if (fd < 0)
        return fd;
    while (done < size) { /* write, not a mapping: a full memory filesystem is ENOSPC here and SIGBUS there */
        ssize_t n = write(fd, p + done, size - done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            r = n < 0 ? -errno : -ENOSPC;
            goto fail;
        }
        done += (uint64_t)n;
    }
    r = rv_memfd_seal(fd);
    if (r < 0)
        goto fail;
    return fd;
fail:
    (void)close(fd);
    return r;
}

int rv_sealed_check(int fd, uint64_t size)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);

    if (seals < 0 || (seals & SEALS) != SEALS)
        return -EPERM;
    if (fstat(fd, &st) < 0)
        return -errno;
    return (uint64_t)st.st_size == size ? 0 : -EMSGSIZE;
}

static int memfd_backend_create(const char *label, uint64_t size, enum rv_huge_pages huge, struct rv_arena *ret_arena,
                                struct rv_error *err)
{
    uint32_t page = SMALL_PAGE;
    uint64_t rounded;
    int fd = -1;

    if (size > INT64_MAX - HUGE_PAGE)
        return rv_error_set(err, EFBIG, ERROR(TOO_LARGE), "an arena of %llu bytes is beyond what a file can hold",
                            (unsigned long long)size);
    if (huge != RV_HUGE_OFF) {
        rounded = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        fd = rv_memfd_create(label, MFD_HUGETLB | MFD_HUGE_2MB);
        if (fd >= 0) {
            /* A shared mapping is the reservation: it fails at once when too few huge pages are free. */
            void *p = ftruncate(fd, (off_t)rounded) < 0
                          ? MAP_FAILED
                          : mmap(NULL, rounded ? rounded : HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

            if (p != MAP_FAILED) {
                (void)munmap(p, rounded ? rounded : HUGE_PAGE); /* the reservation stays with the file */
                page = HUGE_PAGE;
            } else {
                (void)close(fd);
                fd = -1;
            }
        }
        if (fd < 0 && huge == RV_HUGE_ONLY) {
            rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "too few free huge pages of 2 MiB for %llu bytes",
                         (unsigned long long)size);
            rv_error_remedy(err, "raise vm.nr_hugepages, or set pool.huge_pages to auto");
            return -ENOMEM;
        }
    }
    if (page == SMALL_PAGE) {
        rounded = (size + SMALL_PAGE - 1) / SMALL_PAGE * SMALL_PAGE;
        fd = rv_memfd_create(label, 0);
        if (fd >= 0 && ftruncate(fd, (off_t)rounded) < 0) {
            int r = -errno;

            (void)close(fd);
            fd = r;
        }
        if (fd < 0)
            return rv_error_set(err, -fd, ERROR(NO_MEMORY), "cannot create an arena of %llu bytes: %s",
                                (unsigned long long)size, strerror(-fd));
    }
    *ret_arena = (struct rv_arena){.size = rounded, .page_size = page, .backend = RV_BACKEND_MEMFD};
    return fd;
}

static int memfd_backend_seal(int fd, struct rv_error *err)
{
    int r = rv_memfd_seal(fd);

    if (r < 0)
        return rv_error_set(err, -r, ERROR(INTERNAL), "cannot seal an arena: %s", strerror(-r));
    return 0;
}

static int memfd_backend_check(int fd, const struct rv_arena *arena, struct rv_error *err)
{
    struct statfs fs;
    int r = rv_sealed_check(fd, arena->size);

    if (r < 0)
        return rv_error_set(err, -r, ERROR(INTERNAL), "an arena is not sealed or not of %llu bytes",
                            (unsigned long long)arena->size);
    if (fstatfs(fd, &fs) < 0 || (uint64_t)fs.f_bsize != arena->page_size)
        return rv_error_set(err, EINVAL, ERROR(INTERNAL), "an arena has pages of another size than %u bytes",
                            arena->page_size);
    return 0;
}

/*
 * Like mmap of `size` bytes from the start of fd, at a multiple of 2 MiB: where the kernel keeps the arena in blocks of
 * that size, one fault then maps a whole block. The kernel by itself aligns only mappings of reserved huge pages.
 */
static void *map_aligned(uint64_t size, int protection, int flags, int fd)
{
    uint8_t *room, *start, *p;
    uint64_t head;

    if (size < HUGE_PAGE || size > SIZE_MAX - HUGE_PAGE)
        return mmap(NULL, size, protection, flags, fd, 0);
    room = mmap(NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        return mmap(NULL, size, protection, flags, fd, 0);
    head = (HUGE_PAGE - (uintptr_t)room % HUGE_PAGE) % HUGE_PAGE;
    start = room + head;
    p = mmap(start, size, protection, flags | MAP_FIXED, fd, 0);
    if (p == MAP_FAILED) {
        int number = errno;

        (void)munmap(room, size + HUGE_PAGE);
        errno = number;
        return MAP_FAILED;
    }
    if (head)
        (void)munmap(room, head);
    (void)munmap(start + size, HUGE_PAGE - head); /* size is whole pages, and so is this */
    return p;
}

static int memfd_backend_map(int fd, const struct rv_arena *arena, enum rv_map_mode mode, void **ret_address,
                             struct rv_error *err)
{
    void *p;

    if (mode == RV_MAP_PRIVATE && arena->page_size != SMALL_PAGE) {
        rv_error_set(err, EOPNOTSUPP, ERROR(UNSUPPORTED), "an arena of huge pages cannot be mapped copy-on-write");
        rv_error_remedy(err, "ask for the shared read-only mapping, or set pool.huge_pages to off");
        return -EOPNOTSUPP;
    }
    if (arena->size == 0) {
        *ret_address = NULL;
        return 0;
    }
    if (mode == RV_MAP_PRIVATE) /* never MAP_POPULATE: it would copy every page */
        p = map_aligned(arena->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd);
    else
        p = map_aligned(arena->size, PROT_READ, MAP_SHARED, fd);
    if (p == MAP_FAILED)
        return rv_error_set(err, errno, ERROR(NO_MEMORY), "cannot map an arena of %llu bytes: %s",
                            (unsigned long long)arena->size, strerror(errno));
    *ret_address = p;
    return 0;
}

/* What the descriptor names, and what kind of file it is, is known to the driver alone (the interface calls it opaque;
 * a double of the driver gives sockets). A folder or a pipe is certainly not it. */
static int vmm_backend_check(int fd, const struct rv_arena *arena, struct rv_error *err)
{
    struct stat st;

    if (fstat(fd, &st) < 0)
        return rv_error_set(err, errno, ERROR(INTERNAL), "the descriptor of an arena: %s", strerror(errno));
    if (S_ISDIR(st.st_mode) || S_ISFIFO(st.st_mode) || arena->size == 0 || arena->page_size == 0 ||
        arena->size % arena->page_size != 0)
        return rv_error_set(err, EINVAL, ERROR(INTERNAL), "a descriptor or size that is no arena's of a device");
    return 0;
}

static int ipc_backend_check(int fd, const struct rv_arena *arena, struct rv_error *err)
{
    static const uint8_t none[RV_IPC_HANDLE_SIZE];

    if (fd >= 0 || arena->size == 0 || memcmp(arena->handle, none, sizeof(none)) == 0)
        return rv_error_set(err, EINVAL, ERROR(INTERNAL), "an arena of a device without a handle");
    return 0;
}

static const struct rv_backend backends[] = {
    {"memfd", RV_BACKEND_MEMFD, true, false, memfd_backend_create, memfd_backend_seal, memfd_backend_check,
     memfd_backend_map},
    {"cuda-vmm", RV_BACKEND_CUDA_VMM, true, true, NULL, NULL, vmm_backend_check, NULL},
    {"cuda-ipc", RV_BACKEND_CUDA_IPC, false, true, NULL, NULL, ipc_backend_check, NULL},
};

const struct rv_backend *rv_backend_by_id(uint32_t id)
{
    for (unsigned i = 0; i < sizeof(backends) / sizeof(backends[0]); i++)
        if ((uint32_t)backends[i].id == id)
            return &backends[i];
    return NULL;
}

const struct rv_backend *rv_backend_by_name(const char *name)
{
    for (unsigned i = 0; i < sizeof(backends) / sizeof(backends[0]); i++)
        if (strcmp(backends[i].name, name) == 0)
            return &backends[i];
    return NULL;
}
