/* The supervisor's end of the channel to the keeper: exits come in, acknowledgements go out. */
#ifndef RV_KEEPER_LINK_H
#define RV_KEEPER_LINK_H

struct rv_supervisor;

/* Starts listening on RV_KEEPER_FD. 0 or negative errno. */
int rv_keeper_link_init(struct rv_supervisor *s);
void rv_keeper_link_fini(struct rv_supervisor *s);

/* Tells the keeper that resvisor takes requests. */
void rv_keeper_link_ready(struct rv_supervisor *s);

#endif
