"""What a file of your own adds to the library's options, and then uses as the library's own.

@options.activation      a function of arrays: `GLU(activation="its_name")`
"""

from jaxformer.functional.activations import activation as activation
