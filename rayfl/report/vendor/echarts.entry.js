// What rayfl's pages use of Apache ECharts. See README.md in this folder for how the bundle is made.
export * from "echarts/core";
import { use } from "echarts/core";
import { BarChart, BoxplotChart, CustomChart, HeatmapChart, LineChart, SankeyChart, ScatterChart } from "echarts/charts";
import {
  AriaComponent, DataZoomComponent, DatasetComponent, GridComponent, LegendComponent, MarkLineComponent,
  ToolboxComponent, TooltipComponent, VisualMapComponent,
} from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";
use([
  BarChart, BoxplotChart, CustomChart, HeatmapChart, LineChart, SankeyChart, ScatterChart,
  AriaComponent, DataZoomComponent, DatasetComponent, GridComponent, LegendComponent, MarkLineComponent,
  ToolboxComponent, TooltipComponent, VisualMapComponent, CanvasRenderer,
]);
