"""The viewer (`rooftop scene view`): a web page that shows a scene, and the server for its pictures."""
