/* Shift the wall clock of a program by CLOCK_SHIFT seconds, with LD_PRELOAD. Its other clocks stay. */

#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

int clock_gettime(clockid_t clock, struct timespec *at)
{
    int result = syscall(SYS_clock_gettime, clock, at);
    const char *shift = getenv("CLOCK_SHIFT");
    if (result == 0 && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        long long shifted = at->tv_sec * SECOND + at->tv_nsec + (long long)(atof(shift) * SECOND);
        at->tv_sec = shifted / SECOND;
        at->tv_nsec = shifted % SECOND;
    }
    return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}
