package telemetry

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
)

// remote says whether the environment names a collector for a signal, TRACES or METRICS, and how
// to speak to it.
func remote(signal string) (on, grpc bool, err error) {
	endpoint := "OTEL_EXPORTER_OTLP_" + signal + "_ENDPOINT"
	if os.Getenv(endpoint) == "" {
		endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT"
	}
	at := strings.TrimSpace(os.Getenv(endpoint))
	if os.Getenv("OTEL_"+signal+"_EXPORTER") == "none" || at == "" {
		return false, false, nil
	}
	// The exporters would take their default for one that they cannot read.
	schemes := []string{"http", "https"}
	name := "OTEL_EXPORTER_OTLP_" + signal + "_PROTOCOL"
	if os.Getenv(name) == "" {
		name = "OTEL_EXPORTER_OTLP_PROTOCOL"
	}
	switch p := os.Getenv(name); p {
	case "", "http/protobuf":
	case "grpc":
		grpc, schemes = true, append(schemes, "unix")
	default:
		return false, false, fmt.Errorf("%s is %.80q: give http/protobuf or grpc", name, p)
	}
	u, err := url.Parse(at)
	if err != nil || !slices.Contains(schemes, u.Scheme) || u.Host == "" && u.Scheme != "unix" {
		return false, false, fmt.Errorf("%s is %.80q: give a URL, such as http://localhost:4318", endpoint, at)
	}
	return true, grpc, nil
}

// configLog takes in what exporters log of variables that they cannot read, and then ignore.
type configLog struct{ *failures }

func (configLog) Init(logr.RuntimeInfo)            {}
func (configLog) Enabled(int) bool                 { return false }
func (configLog) Info(int, string, ...any)         {}
func (c configLog) WithValues(...any) logr.LogSink { return c }
func (c configLog) WithName(string) logr.LogSink   { return c }

// Error leaves the values out: headers hold secrets.
func (c configLog) Error(err error, msg string, _ ...any) { c.Handle(fmt.Errorf("%s: %w", msg, err)) }

// traceClient returns the client for the collector of spans, nil for none. The
// exporters read everything else in OTEL_EXPORTER_OTLP_* themselves.
func traceClient() (otlptrace.Client, error) {
	switch on, grpc, err := remote("TRACES"); {
	case err != nil || !on:
		return nil, err
	case grpc:
		return otlptracegrpc.NewClient(), nil
	}
	return otlptracehttp.NewClient(), nil
}

// metricReader returns what brings measures to a collector, nil for none.
func metricReader(ctx context.Context) (sdkmetric.Reader, error) {
	on, grpc, err := remote("METRICS")
	if err != nil || !on {
		return nil, err
	}
	var e sdkmetric.Exporter
	if grpc {
		e, err = otlpmetricgrpc.New(ctx)
	} else {
		e, err = otlpmetrichttp.New(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_*: %w", err)
	}
	return sdkmetric.NewPeriodicReader(e), nil
}
