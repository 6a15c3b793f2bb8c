/*
 * The doubles of libcuda.so.1 and libnvidia-ml.so.1: how they are used, configured, and what they answer.
 *
 * They stand in <build>/fakecuda; a program finds them by LD_LIBRARY_PATH. They are never installed.
 *
 * FAKECUDA: statements, separated by ";" or newlines, words by blanks. Nothing said = one discrete device.
 *
 *   device KIND [count=N] [KEY=VALUE …]   one or N more devices
 *       KIND  discrete, unified (integrated, reads the host's memory; NVML knows no memory), unified-plain (the same
 *             without VMM and IPC), tegra (VMM, no IPC of memory, not in NVML), no-vmm, no-fd (VMM without
 *             descriptors), no-ipc, wsl (says that it has descriptors, and fails), bare (neither VMM nor IPC)
 *       KEY   memory=SIZE (8GiB), oom=SIZE (allocations beyond fail), context=SIZE (what each process' context takes),
 *             name=TEXT ("_" for blanks), uuid=GPU-…, ipc=0|1, fd=0|1, nvml=full|silent|hidden,
 *             attr.NUMBER=VALUE ("none" = the driver does not know it)
 *   devices none                          cuInit finds no device
 *   driver VERSION                        13000 = 13.0 (default)
 *   init ERROR                            cuInit fails; 34 = the Toolkit's stub
 *   late MICROSECONDS                     what each asynchronous copy takes at least (200)
 *   missing FUNCTION                      cuGetProcAddress does not find it
 *   nvml ERROR                            nvmlInit_v2 fails
 *   fault FUNCTION|* [nth=N|N+] [error=NUMBER] [program=TEXT] [delay=MS] [lose=DEVICE] [xid=DEVICE:NUMBER]
 *       at the Nth call (N+ = and all later ones) of FUNCTION ("cuMemCreate") in a process whose command line holds
 *       TEXT
 *
 * FAKECUDA_STATE: a folder that all processes of one machine share. Without it everything is a process' own.
 *
 *   memory/PID.N   one file per allocation or context: "DEVICE SIZE PID KIND"; locked (flock) while it lives
 *   lostN          "lost0" = device 0 is lost; its content is the error (empty = 719)
 *   holdN          while it is there, no asynchronous operation of device N begins
 *   xid            a line "DEVICE XID" per event
 *   faults         statements "fault", read anew when the file changes
 */
#ifndef FAKECUDA_H
#define FAKECUDA_H

#define FAKECUDA_ENVIRONMENT "FAKECUDA"
#define FAKECUDA_STATE_ENVIRONMENT "FAKECUDA_STATE"

#endif
