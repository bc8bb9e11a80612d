"""The files of the page: HTML, CSS and JavaScript, served by :mod:`triton_openai.api.page`."""
