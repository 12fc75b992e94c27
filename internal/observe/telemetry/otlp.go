package telemetry

import (
	"cmp"
	"context"
	"fmt"
	"os"

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
	if os.Getenv("OTEL_"+signal+"_EXPORTER") == "none" ||
		cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_"+signal+"_ENDPOINT"), os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT")) == "" {
		return false, false, nil
	}
	name := "OTEL_EXPORTER_OTLP_" + signal + "_PROTOCOL"
	if os.Getenv(name) == "" {
		name = "OTEL_EXPORTER_OTLP_PROTOCOL"
	}
	switch p := os.Getenv(name); p {
	case "", "http/protobuf":
		return true, false, nil
	case "grpc":
		return true, true, nil
	default:
		return false, false, fmt.Errorf("%s is %q: give http/protobuf or grpc", name, p)
	}
}

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
