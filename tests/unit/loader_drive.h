/* A test in the supervisor's place: model files, and the real resvisor-loader at the other end of a socket pair. */
#ifndef LOADER_DRIVE_H
#define LOADER_DRIVE_H

#include <stdint.h>
#include <sys/types.h>

#include "frame.h"

#define DRIVE_WAIT_US 60000000u /* a loader that says nothing for so long is a failure */

struct drive {
    int socket;
    pid_t pid;
};

extern char drive_directory[]; /* of the files; made and removed by the group fixtures */
extern char drive_path[128];   /* of the file that was made last */

int drive_set_up(void **state);
int drive_tear_down(void **state);

/* Byte i of every file's data. */
uint8_t drive_pattern(uint64_t i);

/* Writes a file: length prefix (0 = the header's own), header, bytes of the pattern. Returns an open descriptor. */
int drive_make_file(const char *name, uint64_t prefix, const char *header, uint64_t data);
int drive_make_blob(const char *name, uint64_t size);

/* way: RESVISOR_LOADER_READER, or NULL. */
struct drive drive_start_loader(const char *way);
void drive_greet(const struct drive *l);
void drive_send_start(const struct drive *l, int file, const Rv__LoadStart *start);
void drive_send_admit(const struct drive *l, const Rv__LoadAdmit *admit);

/* The next frame that is not progress. */
struct rv_frame drive_receive(const struct drive *l);

/* Closes the channel and waits: the loader must end by itself with that code. */
void drive_end_loader(struct drive *l, int code);

#endif
