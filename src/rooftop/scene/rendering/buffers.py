"""The data that the stages of a frame share: each field once, with its shape, its writer and its readers.

A *pair* is an instance in one view: pair = view * instances + instance, where `instances` is the number of places, some
of them empty. Lists have a fixed capacity and a counter. Items beyond the capacity are counted but not written, and the
renderer draws the frame again with more room.
"""

import warp as wp

# ---- the scene: meshes written by uploads.py, instances by init_context.py -------------------------------------------


@wp.struct
class Resident:
    """The scene on the device: meshes and instances."""

    words: wp.array(dtype=wp.int32)  # the pages of all meshes, one after another, or the slots of a pool
    page_at: wp.array(dtype=wp.int64)  # (pages,) the start of each; -1: it is not in the pool
    nodes: wp.array3d(dtype=wp.int32)  # (nodes, 8, 16) of all meshes; numbered within each mesh
    mesh: wp.array2d(dtype=wp.int32)  # (meshes, 4): first node, first page, which attributes (HAS_NORMALS, ...), 0
    mesh_steps: wp.array2d(dtype=wp.float32)  # (meshes, 2): the grids of positions and of uv
    mesh_box: wp.array2d(dtype=wp.float32)  # (meshes, 6): centre and half size
    instance_mesh: wp.array(dtype=wp.int32)  # (instances,); -1: no instance in this place
    instance_scale: wp.array(dtype=wp.float32)  # (instances,) the largest stretch factor; < 0: it mirrors
    instance_to_world: wp.array2d(dtype=wp.float64)  # (instances, 12): 3 x 4, from the mesh's origin
    instance_before: wp.array2d(dtype=wp.float64)  # in the previous frame, if it has moved for this one
    instance_moved: wp.array(dtype=wp.int32)  # (instances,) the frame for which it moved last; -1: none
    instance_normals: wp.array2d(dtype=wp.float32)  # (instances, 9): transforms normals to the world


MESH_FIRST_NODE, MESH_FIRST_PAGE, MESH_ATTRIBUTES = wp.constant(0), wp.constant(1), wp.constant(2)
HAS_NORMALS, HAS_UV, HAS_COLORS = wp.constant(1), wp.constant(2), wp.constant(4)  # bits

# ---- the views, written by uploads.py --------------------------------------------------------------------------------


@wp.struct
class Views:
    """The views of a frame, or of the previous frame: cameras, followed by shadow maps."""

    from_world: wp.array2d(dtype=wp.float64)  # (views, 12): 3 x 4, to x right, y down, z forward
    lens: wp.array2d(dtype=wp.float32)  # (views, 8), as named below
    pictures: wp.array2d(dtype=wp.int32)  # (views, 4), as named below
    same: wp.int32  # pixels of each camera's view, if all have one size; else 0: `Canvas.same`


LENS_FX, LENS_FY, LENS_CX, LENS_CY = wp.constant(0), wp.constant(1), wp.constant(2), wp.constant(3)  # pixels
LENS_NEAR = wp.constant(4)  # world units
LENS_ORTHOGRAPHIC = wp.constant(5)  # 1 or 0
LENS_TANGENT = wp.constant(6)  # tangent of the angle between the axis and the farthest corner
LENS_FRAME = wp.constant(7)  # the number of the frame, as the bits of an int32
PICTURE_WIDTH, PICTURE_HEIGHT = wp.constant(0), wp.constant(1)  # pixels
PICTURE_AT = wp.constant(2)  # its first pixel among those of all views
PICTURE_LEVELS = wp.constant(3)  # levels of hierarchical z; level 0 is the pixels

# ---- a frame ---------------------------------------------------------------------------------------------------------


@wp.struct
class Frame:
    """The working data of a frame: by pair, lists, pictures."""

    instances: wp.int32
    cameras: wp.int32  # views except shadow maps: those have a previous frame, and output pictures
    pixel_error: wp.float32  # allowed error of a surface, in pixels
    # For each pair, the transform from the mesh's grid origin to the view: written by init_context, read by all stages.
    to_view: wp.array2d(dtype=wp.float32)  # (pairs, 12)
    before: wp.array2d(dtype=wp.float32)  # (pairs, 12), of the previous frame
    # Lists of the culls. An entry is pair << 32 | item.
    # (2 * PASS,), named below: the number of items of each list, including those without room
    counters: wp.array(dtype=wp.int32)
    nodes: wp.array2d(
        dtype=wp.int64
    )  # (2, room): of one level and of the next; instance_cull, level_cull -> level_cull
    groups: wp.array(dtype=wp.int64)  # level_cull -> level_cull: children that are groups, node * 8 + slot
    # visible clusters of a pass, in any order: page << 11 | cluster; level_cull -> sort_clusters
    found: wp.array(dtype=wp.int64)
    # (2, room): visible clusters of each pass, in order; sort_clusters -> rasterize
    visible: wp.array2d(dtype=wp.int64)
    hidden_instances: wp.array(dtype=wp.int64)  # first pass -> second pass: instances that the first considered hidden
    hidden_children: wp.array(dtype=wp.int64)  # the same for children, in the form of `groups`
    hidden_clusters: wp.array(dtype=wp.int64)  # the same for clusters, in the form of `visible`
    drawn: wp.array(dtype=wp.int64)  # (2 * room,): visible of both passes in order; rasterize -> the stages after it
    records: wp.array2d(dtype=wp.int32)  # (2 * room, 16), as in records.py: those of `drawn`; rasterize -> the same
    ranks: wp.array2d(dtype=wp.int32)  # (2, room): the index in `drawn` of each visible one; rasterize
    # Pictures.
    pixels: wp.array(dtype=wp.int64)  # of all views, by rows: the visibility buffer, DEPTH | rank << 7 | triangle
    # of the cameras, or empty: number of triangles that covered each pixel; rasterize
    fragments: wp.array(dtype=wp.int32)
    large: wp.array(dtype=wp.int64)  # rasterize: place in visible << 7 | triangle, of triangles for the tiles
    pieces: wp.array2d(dtype=wp.int64)  # (room, 8): such triangles clipped; x, y of 3 corners, view, low bits of pixels
    piece_depths: wp.array2d(dtype=wp.float32)  # (room, 3)
    tiles: wp.array(dtype=wp.int64)  # piece << 32 | tile's row << 16 | its column
    # The farthest depth in each square of 2^level x 2^level pixels of the cameras' views: written by hzb, read by the
    # culls.
    hzb: wp.array(dtype=wp.float32)  # all levels of each view from the first on
    hzb_before: wp.array(dtype=wp.float32)
    hzb_at: wp.array2d(dtype=wp.int32)  # (cameras, levels) the start of each level; level 0 is the pixels


DEPTH_SHIFT = wp.constant(
    wp.int64(33)
)  # 30 bits of near / z as a float32, which is at most 1; then 26 bits of rank, and 7 of triangle
TRIANGLE_BITS, TRIANGLE_SHIFT = wp.constant(7), wp.constant(wp.int64(7))
TRIANGLES = wp.constant(128)  # threads of a cluster
RANK_MASK = wp.constant((1 << 26) - 1)

# Counters of a pass; those of the second stand PASS after those of the first.
PASS = wp.constant(64)
GROUPS, VISIBLE = wp.constant(0), wp.constant(1)
HIDDEN_INSTANCES, HIDDEN_CHILDREN, HIDDEN_CLUSTERS = wp.constant(2), wp.constant(3), wp.constant(4)
LARGE, PIECES, TILES = wp.constant(5), wp.constant(6), wp.constant(7)
# Counted for the cameras only; DRAWN_LEVELS has a bit for each level of detail.
DRAWN_TRIANGLES, DRAWN_LEVELS, DRAWN_CLUSTERS = wp.constant(8), wp.constant(9), wp.constant(13)
# And only for persistent_cull: claimed places in its queue (10), finished nodes (11). The queue counts as level 0.
LEVEL = wp.constant(16)  # from here to the end: a counter of nodes for each level of a tree, at most layouts.MAX_DEPTH

# ---- lights, written by shadow_maps.py -------------------------------------------------------------------------------


@wp.struct
class Lights:
    """The lights of a scene and their shadow maps, each a view of its own."""

    kind: wp.array(dtype=wp.int32)  # (lights,): DIRECTIONAL, SPOT or POINT
    vector: wp.array2d(dtype=wp.float64)  # (lights, 3): direction to a directional light, else the light's position
    axis: wp.array2d(dtype=wp.float32)  # (lights, 3): of a spot light's cone, into which it shines
    color: wp.array2d(dtype=wp.float32)  # (lights, 3)
    reach: wp.array2d(dtype=wp.float32)  # (lights, 3): range; for a cone the cosines at which light begins and is full
    maps: wp.array2d(dtype=wp.int32)  # (lights, 3): the first map, the number of maps for a camera, texels of an edge
    from_world: wp.array2d(dtype=wp.float64)  # (maps, 12), as of Views
    lens: wp.array2d(dtype=wp.float32)  # (maps, 8)
    texel_at: wp.array(dtype=wp.int64)  # (maps,) the start of each in `depths`
    depths: wp.array(dtype=wp.float32)  # along the view's axis, of the nearest surface; inf where there is none


DIRECTIONAL, SPOT, POINT = wp.constant(0), wp.constant(1), wp.constant(2)

# ---- what comes out --------------------------------------------------------------------------------------------------


@wp.struct
class Targets:
    """Outputs by pixel, as in `Frame.pixels`, or empty if not requested. Every pixel is written, including
    background."""

    depth: wp.array(dtype=wp.float32)  # world units along the view's axis; emit_depth_targets or base_pass, and so on
    instance: wp.array(dtype=wp.int32)
    cluster: wp.array(dtype=wp.int32)  # its number in the mesh
    triangle: wp.array(dtype=wp.int32)  # its number in the cluster
    level: wp.array(dtype=wp.int32)  # level of detail: 0 is the finest
    material: wp.array(dtype=wp.int32)
    coverage: wp.array(dtype=wp.bool)  # whether a surface covers the pixel's centre
    material_depth: wp.array(dtype=wp.float32)  # (material + 1) / 2^16
    velocity: wp.array2d(dtype=wp.float32)  # pixels since the previous frame, to the right and down
    normal: wp.array2d(dtype=wp.float32)  # in the world; base_pass alone, and so on
    uv: wp.array2d(dtype=wp.float32)
    color: wp.array2d(dtype=wp.float32)  # 0 to 1
    base_color: wp.array2d(dtype=wp.float32)  # in linear light; base_colors
    vertex_color: wp.array2d(dtype=wp.float32)
    shadow: wp.array2d(dtype=wp.float32)  # (pixels, lights): shadows
