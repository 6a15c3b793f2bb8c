/* Every limit that more than one file knows. A limit used in one file lives there. Sizes in bytes. */
#ifndef RV_LIMITS_H
#define RV_LIMITS_H

#define RV_PROTOCOL_VERSION 1u

#define RV_FRAME_MAX (64u * 1024)       /* one SEQPACKET message */
#define RV_BODY_MAX (17u * 1024 * 1024) /* one spilled body: a prompt of 16 MiB, and what goes with it */
#define RV_UNPACK_BASE (16u * 1024)     /* memory that one unpacked message may take: this much, and */
#define RV_UNPACK_FACTOR 16u            /* so many times its length (honest lists of small records need 8) */
#define RV_FRAME_FDS_MAX 16u            /* descriptors per message (the kernel's limit is 253) */

#define RV_NAME_MAX 64u                   /* model, type and job names */
#define RV_PATH_MAX 4096u                 /* file paths in messages */
#define RV_SOCKET_PATH_MAX 90u            /* AF_UNIX paths: the kernel's limit is 107, children add names */
#define RV_ARENAS_MAX 8u                  /* arenas of one model */
#define RV_TENSOR_ALIGN 256u              /* tensors in an arena (DESIGN: under 64 results change) */
#define RV_RANK_MAX 8u                    /* dimensions of a tensor */
#define RV_TENSORS_MAX (4u * 1024 * 1024) /* tensors of one model */
#define RV_TENSOR_NAME_MAX 4096u

#define RV_TYPES_MAX 32u
#define RV_DEVICES_MAX 16u /* of one machine */
#define RV_WORKERS_PER_TYPE_MAX 16u
#define RV_ACCEPTS_MAX 8u   /* kinds of graphs that a type names */
#define RV_MODELS_MAX 1024u /* catalogue entries, configured and by path */
#define RV_FOLDERS_MAX 64u
#define RV_TYPE_MODELS_MAX 16u
#define RV_ENV_MAX 64u
#define RV_TYPE_ARGS_MAX 64u /* arguments of a worker's script */
#define RV_DEATHS_MAX 1000u  /* of one worker that are remembered: types.*.max_deaths goes so far */

#define RV_PARAMS_MAX 64u
#define RV_PARAM_VALUE_MAX 4096u
#define RV_PAYLOAD_MAX (512u * 1024)
#define RV_RPC_FRAME_MAX (768u * 1024)
#define RV_PIECE_MAX (512u * 1024)
#define RV_OUTPUTS_MAX 8u          /* outputs of one job */
#define RV_OUTPUT_MAX (4ull << 30) /* bytes of one output */
#define RV_JOB_LEDGER_MAX 4096u    /* dispatched job ids that the supervisor remembers */

#endif
