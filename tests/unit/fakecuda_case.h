/*
 * Cases on the double of libcuda. A case runs in a child process of its own, because configuration and driver belong
 * to a process: it sets FAKECUDA, loads the double, takes its functions and calls cuInit.
 */
#ifndef FAKECUDA_CASE_H
#define FAKECUDA_CASE_H

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "cuda/driver.h"

#define MIB (1ull << 20)
#define CASE_SECONDS 60

/* Ends the case when the condition does not hold. */
#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
            _exit(1);                                                                      \
        }                                                                                  \
    } while (0)

#define WANT(call, wanted)                                                                                   \
    do {                                                                                                     \
        int got_ = (int)(call);                                                                              \
        if (got_ != (int)(wanted)) {                                                                         \
            fprintf(stderr, "%s:%d: %s is %d, wanted %d\n", __FILE__, __LINE__, #call, got_, (int)(wanted)); \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

#define OK(call) WANT(call, CUDA_SUCCESS)

static struct rv_cuda_driver cu;
static PFN_cuGetProcAddress_v12000 search;

static inline void driver_load(const char *configuration)
{
    if (configuration != NULL)
        setenv("FAKECUDA", configuration, 1);
    void *library = dlopen(RV_FAKECUDA "/libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    *(void **)&search = dlsym(library, "cuGetProcAddress_v2");
    CHECK(search != NULL);
#define X(name, version, needed) OK(search("cu" #name, (void **)&cu.name, RV_CUDA_REQUEST_VERSION, 1, NULL));
    RV_CUDA_FUNCTIONS(X)
#undef X
}

/* Loaded, initialised, and the first device's primary context is current. */
static inline CUcontext driver_start(const char *configuration)
{
    CUcontext context;
    driver_load(configuration);
    OK(cu.Init(0));
    OK(cu.DevicePrimaryCtxRetain(&context, 0));
    OK(cu.CtxSetCurrent(context));
    return context;
}

static inline int child_wait(pid_t child)
{
    int status;
    while (waitpid(child, &status, 0) != child)
        ;
    return status;
}

/* Runs a case in a child and wants it to end well. */
static inline void case_run(void (*body)(void))
{
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(CASE_SECONDS);
        body();
        exit(0);
    }
    assert_int_equal(child_wait(child), 0);
}

#define CASE(name)                 \
    static void name##_body(void); \
    static void name(void **state) \
    {                              \
        (void)state;               \
        case_run(name##_body);     \
    }                              \
    static void name##_body(void)

#endif
