"""A model with tensors of its own: it repeats the prompt's words in upper case, each in a response of its own."""

import numpy as np
import triton_python_backend_utils as pb

_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            prompt = _value(request, "PROMPT").decode()
            limit = int(_value(request, "MAX_LEN"))
            stops = pb.get_input_tensor_by_name(request, "STOP_WORDS")
            stops = set() if stops is None else {word.decode() for word in stops.as_numpy()}
            words = prompt.upper().split()
            text = prompt if _value(request, "RETURN_FULL_TEXT") else ""
            count = 0
            for word in words[:limit]:
                if word in stops:
                    break
                text += f" {word}" if text else word
                count += 1
                sender.send(_response(text, "", len(words), count))
            reason = "max_length" if count == limit < len(words) else "eos"
            sender.send(_response(text, reason, len(words), count), flags=_FINAL)


def _value(request, name):
    return pb.get_input_tensor_by_name(request, name).as_numpy().flat[0]


def _response(text, reason, asked, count):
    texts = {"GENERATED": text, "REASON": reason}
    counts = {"N_IN": asked, "N_OUT": count}
    outputs = [pb.Tensor(name, np.array([value.encode()], dtype=object)) for name, value in texts.items()]
    outputs += [pb.Tensor(name, np.array([value], dtype=np.int32)) for name, value in counts.items()]
    return pb.InferenceResponse(outputs)
