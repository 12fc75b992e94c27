# The image of a run on Kubernetes (launcher manifest): the launcher and one program, static, and nothing else.
#
#	docker build --build-arg PROGRAM=./examples/gpt -t IMAGE .
#
# Static means without cgo, and so without --clocks on NVIDIA's cards: for those, build with CGO_ENABLED=1 FROM a base with glibc.
FROM golang:1.26 AS build
ARG PROGRAM=./examples/gpt
WORKDIR /src
COPY . .
RUN CGO_ENABLED=0 go build -trimpath -ldflags=-s -o /out/launcher ./launcher && \
    CGO_ENABLED=0 go build -trimpath -ldflags=-s -o /out/train "$PROGRAM"

FROM scratch
COPY --from=build /out/ /
ENTRYPOINT ["/launcher"]
