/* An emulation of the data path that a single-threaded converter in Rust publishes: map the sources, write each target front to back through
 * an 8 MiB buffer, then rename it. No sync, no digest, no check, and the list of ranges is ready: a lower bound of such a program.
 *
 *   rival LIST OUT        LIST: lines "target PATH" and "copy OFFSET LENGTH COUNT STRIDE SOURCE", in the order of the target
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BUFFER = 8 << 20, MOST = 4096 };
static char *buffer, *maps[MOST], names[MOST][512];
static size_t filled, sizes[MOST];
static int out = -1, count;

static void fail(const char *what) { perror(what); exit(1); }

static void flush(void) {
    for (size_t done = 0; done < filled;) {
        ssize_t n = write(out, buffer + done, filled - done);
        if (n < 0) fail("write");
        done += n;
    }
    filled = 0;
}

static char *mapped(const char *name, size_t end) {
    for (int i = 0; i < count; i++)
        if (!strcmp(names[i], name)) return end <= sizes[i] ? maps[i] : (exit(1), NULL);
    int file = open(name, O_RDONLY);
    struct stat status;
    if (file < 0 || fstat(file, &status) || count == MOST) fail(name);
    maps[count] = mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    if (maps[count] == MAP_FAILED) fail("mmap");
    sizes[count] = status.st_size;
    strcpy(names[count], name);
    close(file);
    return maps[count++];
}

int main(int argc, char **argv) {
    char line[2048], name[512], temporary[1024] = "", final[1024];
    size_t offset, length, runs, stride;
    FILE *list = argc == 3 ? fopen(argv[1], "r") : NULL;
    if (!list || !(buffer = malloc(BUFFER))) fail("usage");
    mkdir(argv[2], 0777);
    while (fgets(line, sizeof line, list)) {
        if (sscanf(line, "target %511[^\n]", name) == 1) {
            if (out >= 0) { flush(); close(out); rename(temporary, final); }
            snprintf(final, sizeof final, "%s/%s", argv[2], name);
            snprintf(temporary, sizeof temporary, "%s/%s.tmp", argv[2], name);
            if ((out = open(temporary, O_WRONLY | O_CREAT | O_TRUNC, 0666)) < 0) fail(temporary);
        } else if (sscanf(line, "copy %zu %zu %zu %zu %511[^\n]", &offset, &length, &runs, &stride, name) == 5) {
            char *map = mapped(name, offset + (runs - 1) * stride + length);
            for (size_t run = 0; run < runs; run++)
                for (size_t done = 0; done < length;) {
                    size_t n = length - done < BUFFER - filled ? length - done : BUFFER - filled;
                    memcpy(buffer + filled, map + offset + run * stride + done, n);
                    filled += n;
                    done += n;
                    if (filled == BUFFER) flush();
                }
            size_t page = sysconf(_SC_PAGESIZE), start = offset / page * page;
            madvise(map + start, offset + (runs - 1) * stride + length - start, MADV_DONTNEED);
        }
    }
    flush();
    close(out);
    return rename(temporary, final);
}
