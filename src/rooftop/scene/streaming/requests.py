"""The page requests of the culling kernels: how much a frame wants each page, and which wanted pages are absent.

The culling kernels write `wanted`. `collect` then updates the ages of all pages, and lists the wanted pages that are
absent. The list follows the frame's counters in one tensor. So the host (`answers.py`) reads the list and the counters
with one copy, when it waits for the frame anyway.
"""

import warp as wp

from rooftop.scene.rendering import buffers

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

COUNTERS = 2 * buffers.PASS  # number of counters of a frame; they come first in an answer
# positions in an answer after the counters: the number of wanted pages, the number of wanted pages that are absent,
# `Requests.refused`, and the start of the list of absent pages, each with its `wanted`
WANTED, MISSING, REFUSED, LIST = (wp.constant(COUNTERS + place) for place in range(4))
LISTED = 1024  # maximum number of absent pages that an answer lists; if there are more, the host reads all of `wanted`
OLDEST = wp.constant(2**30)


@wp.struct
class Requests:
    """The page requests of a scene whose pages may be absent. The culling kernels and `collect` use this struct."""

    group_page: wp.array(dtype=wp.int32)  # (groups,) page of each group, both numbered over all meshes
    first_group: wp.array(dtype=wp.int32)  # (meshes,) index of each mesh's first group
    # (pages,) bits of a float32: the picture's error, in pixels, if the page is absent; 0 if the page is not wanted
    wanted: wp.array(dtype=wp.int32)
    ages: wp.array(dtype=wp.int32)  # (pages,) number of frames since the page was last wanted
    refused: wp.array(dtype=wp.int32)  # (1,) index of an invalid page plus one, or 0; admission.py writes it
    # (LIST + 2 * LISTED,): the frame's counters, the values at WANTED, MISSING and REFUSED, and the list at LIST
    answer: wp.array(dtype=wp.int32)


@wp.kernel
def collect(requests: Requests, page_at: wp.array(dtype=wp.int64), aging: wp.int32, stride: wp.int32):
    """Update the ages and write the answer. `aging` is 1 if unwanted pages become older, 0 if not."""
    if wp.tid() == 0:
        requests.answer[REFUSED] = requests.refused[0]
    for page in range(wp.tid(), requests.wanted.shape[0], stride):
        wanted = requests.wanted[page]
        if wanted != 0:
            requests.ages[page] = 0
            wp.atomic_add(requests.answer, WANTED, 1)
            if page_at[page] < wp.int64(0):
                place = LIST + 2 * wp.atomic_add(requests.answer, MISSING, 1)
                if place + 1 < requests.answer.shape[0]:
                    requests.answer[place] = page
                    requests.answer[place + 1] = wanted
        else:
            requests.ages[page] = wp.min(requests.ages[page] + aging, OLDEST)
